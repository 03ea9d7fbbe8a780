"""The same student and teacher in DDP and sharded, side by side, then a sharded run of a recipe.

torchrun --nproc_per_node 2 tests/sharded_training.py FOLDER [the recipe's settings] writes into FOLDER what
each case came to on each process.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, GradientAccumulationPlugin

from nestling.recipes.dino_vit import main as recipe
from nestling.ssl import config as schema
from nestling.ssl import optim
from nestling.ssl.config import Config
from nestling.ssl.data.loader import Batch
from nestling.ssl.distillation import SelfDistillation
from nestling.ssl.distributed import local
from nestling.ssl.run import sharding
from nestling.ssl.run.nonfinite import has_broken_weights
from nestling.ssl.run.processes import HARMLESS
from nestling.ssl.schedules import StepValues
from nestling.ssl.training import clipped, compared, forget_gradients, seed_step, update_student

ACCUMULATION, STEPS = 2, 3
XCIT = schema.Backbone("xcit_nano_12_p4", 0.2, {"embed_dim": 16, "depth": 2, "num_heads": 2})
VIT = schema.Backbone("vit_tiny_p16", 0.2, {"patch": 4, "embed_dim": 16, "depth": 2, "num_heads": 2})
SWIN = schema.Backbone("swin_tiny_w7", 0.2, {"embed_dim": 8, "depth": 1, "num_heads": 1})
HEAD = schema.Head(num_prototypes=33, hidden_dim=24, bottleneck_dim=7)  # 33 rows: the parts are unequal
LARGE = schema.Train(batch_size=3, accumulation=ACCUMULATION, precision="fp32")

# Per case a run in DDP and one that is sharded.
ADAMW = Config(
    backbone=XCIT,
    views=schema.Views(global_size=[16], num_local=2, local_size=[8]),
    head=replace(HEAD, norm_last_layer=False),
    optim=schema.Optim(clip=0.05),
    train=LARGE,
)
GLOBAL_NORM = replace(
    ADAMW,
    backbone=VIT,
    head=replace(HEAD, batch_norm=True),
    optim=schema.Optim("sgd", clip_mode="global_norm", clip=0.2),
)
IN_BF16 = replace(ADAMW, backbone=VIT, train=replace(LARGE, precision="bf16"))
CASES = {
    "adamw": (ADAMW, ADAMW),
    "sgd": (GLOBAL_NORM, replace(GLOBAL_NORM, train=replace(LARGE, activation_checkpointing=True))),
    "lars": (replace(ADAMW, backbone=SWIN, head=HEAD, optim=schema.Optim("lars", clip=0.1)),) * 2,
    # AdamW makes a whole step of a gradient's sign, and so much of a weight that rounds to another bf16.
    "bf16": (replace(IN_BF16, optim=schema.Optim("sgd", clip=0.05)),) * 2,
    "fused bf16": (IN_BF16, IN_BF16),
}
# The case whose run in DDP leaves no last layer to the loss, which rounds logits otherwise.
AS_IN_PARTS = "bf16"


def images(step: int, micro: int, process: int, config: Config) -> Batch:
    """Random views, of each process its own."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + process)
    size, views = config.train.batch_size, config.views
    shapes = [(2 * size, 3, *views.global_size * 2), (views.num_local * size, 3, *views.local_size * 2)]
    drawn = [torch.randint(256, shape, dtype=torch.uint8, generator=generator) for shape in shapes]
    return Batch(drawn, torch.arange(size), step, [], 0)


def values_at(step: int) -> StepValues:
    return StepValues(5e-3, 0.1, 0.9, 0.05, last_layer_frozen=step < 2, backbone_frozen=step < 1)


class Training:
    """A method in training, and how its steps went."""

    def __init__(self, config: Config, accelerator: Accelerator, is_fused: bool = True) -> None:
        self.config, self.accelerator = config, accelerator
        torch.manual_seed(config.seed)
        self.method = SelfDistillation(config)
        self.own = optim.build(config.optim, optim.parameter_groups(self.method.student))
        self.student, self.optimizer = sharding.prepared(self.method, self.own, accelerator, config)
        if not is_fused:
            for network in (self.method.student, self.method.teacher):
                network.register_forward_hook(lambda _, __, seen: replace(seen, logits=list(seen.logits)))
        self.losses: list[float] = []
        self.norms: list[float] = []

    def loss(self, step: int, micro: int) -> torch.Tensor:
        batch = images(step, micro, self.accelerator.process_index, self.config)
        shared = (values_at(step), self.config, self.accelerator)
        return compared(self.method, self.student, batch, *shared)[0]

    def gradients(self, step: int, factor: float = 1.0) -> float:
        """Leave the clipped gradients of a step; returns their norm before."""
        optim.apply(self.own, values_at(step))
        seed_step(self.config.seed, step, self.accelerator.process_index)
        for micro in range(ACCUMULATION):
            with self.accelerator.accumulate(self.student):
                loss = self.loss(step, micro)
                self.accelerator.backward(factor * loss)
            self.losses.append(float(loss.detach()))
        return float(clipped(self.method, self.optimizer, self.config, self.accelerator))

    def go_on_from(self, states: dict[str, Any]) -> None:
        """Take over what another training came to, as a run does from its checkpoint."""
        sharding.load(self.method.student, states["student"])
        sharding.load(self.method.teacher, states["teacher"])
        self.method.terms.load_state_dict(states["terms"])
        sharding.load_optimizer(self.own, states["optimizer"])

    def run(self, first: int = 0, end: int = STEPS) -> dict[str, Any]:
        """Take the steps; losses, norms, whole states, and how many numbers this process keeps."""
        for step in range(first, end):
            self.norms.append(self.gradients(step))
            update_student(self.method, self.optimizer, values_at(step))
            self.method.update_teacher(values_at(step).momentum)
        moments = [v for state in self.own.state.values() for name, v in state.items() if name != "step"]
        kept = {
            "student": numbers(self.method.student.parameters()),
            "teacher": numbers(self.method.teacher.parameters()),
            "moments": numbers(moments),
        }
        states = sharding.gathered(self.method, self.own, is_kept=True)
        return {"losses": list(self.losses), "norms": self.norms, "kept": kept, **states}

    def look_aside(self) -> dict[str, Any]:
        """What may come between two steps."""
        second, found = self.accelerator.process_index == 1, {"was_broken": has_broken_weights(self.method)}
        # A loss of NaN on one process, the look for its cause, and the step is left out.
        found["norm"] = self.gradients(STEPS, float("nan") if second else 1.0)
        with torch.no_grad():
            self.loss(STEPS, 0)
        found["are_parts"] = all(map(sharding.is_applied, (self.method.student, self.method.teacher)))
        forget_gradients(self.optimizer, self.accelerator)
        before = torch.get_rng_state()
        found["copy"] = sharding.whole_backbone(self.method.teacher.backbone, self.config).state_dict()
        found["draws_nothing"] = torch.equal(before, torch.get_rng_state())
        found["teacher"] = sharding.gathered(self.method, self.own, True)["teacher"]
        weight = local(next(p for p in self.method.teacher.parameters() if p.ndim == 2))
        weight.fill_(float("inf") if second else 0.0)
        found["is_broken"] = has_broken_weights(self.method)
        return found


def numbers(tensors: Any) -> int:
    return sum(local(tensor).numel() for tensor in tensors)


def sharded(config: Config) -> Config:
    return replace(config, train=replace(config.train, sharding="full"))


@contextmanager
def accelerated(precision: str, as_on_gpus: bool = False) -> Iterator[Accelerator]:
    """accelerate for these processes; `as_on_gpus` tells it the kind that it finds on GPUs alone."""
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="no" if precision == "fp32" else precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(ACCUMULATION, sync_each_batch=True),
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
    )
    if as_on_gpus:
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = sharding.fsdp2()
    yield accelerator
    AcceleratorState._reset_state()
    GradientState._reset_state()


def main(folder: Path, settings: list[str]) -> None:
    for message, category in HARMLESS.items():
        warnings.filterwarnings("ignore", message, category)
    results: dict[str, Any] = {}
    for name, (in_ddp, in_parts) in CASES.items():
        with accelerated(in_ddp.train.precision) as accelerator:
            results[f"{name} ddp"] = Training(in_ddp, accelerator, name != AS_IN_PARTS).run()
            results[f"{name} sharded"] = Training(sharded(in_parts), accelerator).run()
            if name == "adamw":
                results["stopped"] = Training(sharded(in_parts), accelerator).run(end=1)
                resumed = Training(sharded(in_parts), accelerator)
                resumed.go_on_from(results["stopped"])
                results["resumed"] = resumed.run(first=1)
    with accelerated("fp32", as_on_gpus=True) as accelerator:
        training = Training(sharded(ADAMW), accelerator)
        results["adamw accelerate"] = training.run()
        results["aside"] = training.look_aside()
        torch.save(results, folder / f"{accelerator.process_index}.pt")
    recipe([*settings, "train.sharding=full"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
