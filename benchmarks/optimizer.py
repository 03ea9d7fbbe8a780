"""Moving average, AdamW and clipping against loops over the parameters.

    python benchmarks/optimizer.py [--threads 1 2] [--quick] [--json FILE] [--device cuda]

The parameters are those of XCiT-S12/16 and its head of 65,536 prototypes (48 M in 340 tensors). One
gradient in ten is above the largest norm, or all are. That norm falls a little from call to call, so that
a gradient which was clipped before is above it once more.
"""

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from published import adamw_loop, clip_loop, ema_loop
from side_by_side import Case, main
from torch import Tensor

from nestling.ssl import optim
from nestling.ssl.config import Backbone, Config, Head
from nestling.ssl.distillation import SelfDistillation, follow
from nestling.ssl.schedules import StepValues

MAX_NORM, FALL, MOMENTUM = 3.0, 0.99, 0.996
TOLERANCE = 1e-3  # relative: torch's own norm of the last layer's 17 M numbers is off by 6e-4
LOOP = "parameter loop"
VALUES = StepValues(
    lr=5e-4,
    weight_decay=0.04,
    momentum=MOMENTUM,
    temperature=0.04,
    last_layer_frozen=False,
    backbone_frozen=False,
)


def config_of(quick: bool) -> Config:
    """The networks named above, or small ones."""
    if quick:
        small = Backbone("xcit_nano_12_p16", options={"embed_dim": 16, "depth": 1, "num_heads": 2})
        return Config(backbone=small, head=Head(num_prototypes=64, hidden_dim=32, bottleneck_dim=16))
    return Config(backbone=Backbone("xcit_small_12_p16"))


class Side:
    """Networks, gradients and optimizer; both sides hold the same numbers.

    One gradient in `every` has a norm of five times the largest, the others have a third of it.
    """

    def __init__(self, config: Config, device: torch.device, every: int, is_ours: bool) -> None:
        torch.manual_seed(0)
        self.method = SelfDistillation(config).to(device)
        self.student = list(self.method.student.parameters())
        self.teacher = [parameter.data for parameter in self.method.teacher.parameters()]
        self.gradients: list[Tensor] = []
        with torch.no_grad():
            for number, parameter in enumerate(self.student):
                gradient = torch.randn_like(parameter)
                norm = MAX_NORM * (5 if number % every == 0 else 1 / 3)
                self.gradients.append(gradient.mul_(norm / gradient.norm()))
                parameter.grad = self.gradients[-1]
                parameter += 0.01 * torch.randn_like(parameter)  # no longer what the teacher's is
        groups = optim.parameter_groups(self.method.student)
        self.optimizer = optim.build(config.optim, groups) if is_ours else adamw_loop(groups)
        optim.apply(self.optimizer, VALUES)
        self.norms = (MAX_NORM * FALL**call for call in itertools.count())

    def clip(self) -> None:
        optim.clip(self.student, "per_parameter", next(self.norms))

    def clip_as_published(self) -> None:
        clip_loop(self.student, next(self.norms))

    def average(self) -> None:
        follow(self.method.teacher, self.method.student, MOMENTUM)

    def average_as_published(self) -> None:
        ema_loop(self.teacher, self.student, MOMENTUM)

    def sweep(self) -> None:
        self.clip()
        self.optimizer.step()
        self.average()

    def sweep_as_published(self) -> None:
        self.clip_as_published()
        self.optimizer.step()
        self.average_as_published()


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Each part alone, then all of them as in a step; then the worst case of clipping."""
    config, rounds = config_of(quick), 2 if quick else 9
    yield from compared_parts(config, device, rounds)
    yield clipping_of_all(config, device, rounds)


def compared_parts(config: Config, device: torch.device, rounds: int) -> Iterator[Case]:
    """Clipping, moving average and AdamW alone, then one after the other."""
    ours, theirs = sides(config, device, every=10)
    check = partial(compare, ours, theirs)
    for part, mine, others, at_least in (
        ("clipping, one gradient in ten above", ours.clip, theirs.clip_as_published, 1.9),
        ("moving average", ours.average, theirs.average_as_published, 2.7),
        ("AdamW", ours.optimizer.step, theirs.optimizer.step, 5),
        ("clipping, AdamW, moving average", ours.sweep, theirs.sweep_as_published, None),
    ):
        yield Case(part, LOOP, mine, others, check, at_least=at_least, rounds=rounds)


def clipping_of_all(config: Config, device: torch.device, rounds: int) -> Case:
    ours, theirs = sides(config, device, every=1)
    calls = ours.clip, theirs.clip_as_published
    return Case("clipping, all gradients above", LOOP, *calls, partial(compare, ours, theirs), rounds=rounds)


def sides(config: Config, device: torch.device, every: int) -> tuple[Side, Side]:
    return Side(config, device, every, is_ours=True), Side(config, device, every, is_ours=False)


def compare(ours: Side, theirs: Side) -> None:
    """Both sides do their work once; raises AssertionError for what differs by more than fp32 sums do."""
    ours.sweep()
    theirs.sweep_as_published()
    for name in ("gradients", "student", "teacher"):
        for number, (mine, other) in enumerate(zip(getattr(ours, name), getattr(theirs, name), strict=True)):
            said = f"{name}, tensor {number}: "
            torch.testing.assert_close(
                mine, other, rtol=TOLERANCE, atol=1e-6, msg=lambda told, s=said: s + told
            )


if __name__ == "__main__":
    main(cases, __doc__)
