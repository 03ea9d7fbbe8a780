"""Sharded training: two and three real processes on CPUs, against DDP and against a single one.

accelerate has no FSDP on CPUs. So `tests/sharded_training.py` runs both ways there: torch's `fully_shard` on
the same units, which is what a run on CPUs does, and accelerate's own code, told that it is on GPUs.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from config_observers import left_as_found
from image_folder import write_image_folder
from torch import Tensor, nn

from nestling.recipes.dino_vit import main as recipe
from nestling.ssl import config as schema
from nestling.ssl.config import Config
from nestling.ssl.distillation import Network, build_network
from nestling.ssl.errors import UserError
from nestling.ssl.run import checkpoints, sharding
from nestling.ssl.run.loading import load_backbone
from nestling.ssl.run.log import read

ROOT = Path(__file__).parents[3]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
SETTINGS = [
    *("backbone.name=vit_tiny_p16", "backbone.options={patch: 4, embed_dim: 16, depth: 2, num_heads: 2}"),
    *("backbone.drop_path=0", "views.global_size=16", "views.num_local=2", "views.local_size=8"),
    *("head.num_prototypes=33", "head.hidden_dim=24", "head.bottleneck_dim=7", "head.freeze_epochs=1"),
    *("optim.lr=1e-3", "optim.lr_scaling=none", "optim.warmup_epochs=1", "optim.clip=0.05"),
    *("teacher.momentum=0.9", "teacher.temperature_warmup_epochs=0", "train.epochs=3", "train.keep_last=9"),
    *("train.precision=fp32", "data.num_workers=0", "data.holdout=0.25", "knn.k=3", "log.every=1"),
    *("log.progress=none",),
]


# Times, and the spread of the features of one process's own images.
OF_A_PROCESS = {"images_per_second", "data_wait", "feature_std"}


def together(count: int, *arguments: object) -> str:
    """What that many processes say."""
    command = [*TORCHRUN, str(count), *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stdout + done.stderr, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all runs left: on one process, on two that shard, and each gone on from by the other kind."""
    root = tmp_path_factory.mktemp("sharding")
    images = write_image_folder(root / "images", per_class=12, size=20)
    shared = [*SETTINGS, f"data.train={images}"]
    run_alone([*shared, f"out={root / 'alone'}", "train.batch_size=12"])
    together(2, "tests/sharded_training.py", root, *shared, f"out={root / 'two'}", "train.batch_size=6")
    for began, goes_on in (("alone", "three"), ("two", "one")):
        stop_after_the_first_epoch(root / began, root / goes_on)
    run_alone([*shared, f"out={root / 'one'}", "train.batch_size=12", "resume=auto"])
    three = [*shared, f"out={root / 'three'}", "train.batch_size=4", "train.sharding=full", "resume=auto"]
    said = together(3, "recipes/dino_vit.py", *three)
    assert said.count("train.sharding=full by torch's fully_shard, as accelerate has no FSDP on cpu") == 1
    return root


def run_alone(settings: list[str]) -> None:
    with left_as_found():
        recipe(settings)


def stop_after_the_first_epoch(whole: Path, part: Path) -> None:
    """A copy of a run as it was then."""
    first = checkpoints.saved(whole)[0]
    copy = part / "checkpoints" / first.name
    copy.mkdir(parents=True)
    for file in first.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    for name in ("config.yaml", "environment.json", "log.jsonl"):
        (part / name).write_bytes((whole / name).read_bytes())


@pytest.fixture(scope="module")
def cases(root: Path) -> list[dict[str, Any]]:
    """Per process what the cases came to."""
    return [torch.load(root / f"{process}.pt", weights_only=True) for process in (0, 1)]


def states(result: dict[str, Any]) -> dict[str, Tensor]:
    """Networks and terms, but for the biases of keys: no loss depends on them, so all they get is noise."""
    parts = ("student", "teacher", "terms")
    found = {f"{part}.{name}": tensor for part in parts for name, tensor in result[part].items()}
    return {name: tensor for name, tensor in found.items() if not name.endswith("qkv.bias")}


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor], atol: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(
            one[name], other[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "way"),
    [
        ("adamw", "sharded"),
        ("adamw", "accelerate"),
        ("sgd", "sharded"),
        ("lars", "sharded"),
        ("bf16", "sharded"),
    ],
)
def test_sharded_steps_are_those_of_ddp(cases, case, way):
    """XCiT, ViT and Swin; both ways to clip; frozen parts; drop path; accumulation; averaged statistics."""
    for process in cases:
        in_ddp, in_parts = process[f"{case} ddp"], process[f"{case} {way}"]
        assert in_parts["losses"] == pytest.approx(in_ddp["losses"], rel=1e-5)
        assert in_parts["norms"] == pytest.approx(in_ddp["norms"], rel=1e-5)
        assert min(in_ddp["norms"]) > 1, "so gradients were clipped"
    in_ddp, in_parts = cases[0][f"{case} ddp"], cases[0][f"{case} {way}"]
    assert_close(states(in_ddp), states(in_parts))
    one, other = in_ddp["optimizer"], in_parts["optimizer"]
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for moments, others in zip(one["state"].values(), other["state"].values(), strict=True):
        for name, moment in moments.items():
            assert (moment - others[name]).norm() <= 1e-4 * moment.norm() + 1e-6, name


@pytest.mark.slow
def test_in_bf16_the_loss_fused_with_the_last_layer_stays_near(cases):
    """DDP as it runs, with AdamW: logits are rounded elsewhere, and three steps are far from rounding."""
    for process in cases:
        fused, in_parts = process["fused bf16 ddp"], process["fused bf16 sharded"]
        assert in_parts["losses"] == pytest.approx(fused["losses"], rel=0.05)
        assert in_parts["norms"] == pytest.approx(fused["norms"], rel=0.15)
        assert in_parts["losses"] != fused["losses"]
        for part, most in (("student", 0.05), ("teacher", 0.01), ("terms", 0.03)):
            assert distance(fused[part], in_parts[part]) < most, part


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Of all numbers together, relative to the length of the first."""
    assert one.keys() == other.keys()
    first, second = (torch.cat([state[name].double().flatten() for name in one]) for state in (one, other))
    return float((first - second).norm() / first.norm())


@pytest.mark.slow
def test_two_that_go_on_from_the_whole_states_of_two_are_those_left_alone_to_the_bit(cases):
    for process in cases:
        alone, stopped, resumed = (process[name] for name in ("adamw sharded", "stopped", "resumed"))
        assert stopped["losses"] + resumed["losses"] == alone["losses"]
        assert stopped["norms"] + resumed["norms"] == alone["norms"]
        for part in ("student", "teacher", "terms"):
            assert all(torch.equal(tensor, resumed[part][name]) for name, tensor in alone[part].items()), part
        for index, moments in alone["optimizer"]["state"].items():
            others = resumed["optimizer"]["state"][index]
            assert all(torch.equal(moment, others[name]) for name, moment in moments.items()), index


@pytest.mark.slow
def test_each_of_two_processes_keeps_half(cases):
    for way in ("sharded", "accelerate"):
        parts = [process[f"adamw {way}"]["kept"] for process in cases]
        for name, whole in cases[0]["adamw ddp"]["kept"].items():
            assert sum(part[name] for part in parts) == whole
            for part in parts:
                assert part[name] / whole == pytest.approx(0.5, abs=0.01), name


@pytest.mark.slow
def test_what_one_process_finds_not_finite_all_know_and_looking_leaves_the_parts(cases):
    for process in cases:
        aside = process["aside"]
        assert aside["norm"] != aside["norm"], "NaN"
        assert aside["are_parts"]
        assert not aside["was_broken"]
        assert aside["is_broken"]


@pytest.mark.slow
def test_what_is_evaluated_is_the_whole_teacher_on_every_process(cases):
    for process in cases:
        copy, teacher = process["aside"]["copy"], process["aside"]["teacher"]
        assert process["aside"]["draws_nothing"]
        assert_close(copy, {name: teacher[f"backbone.{name}"] for name in copy}, 0)


@pytest.mark.slow
@pytest.mark.parametrize("run", ["two", "one", "three"])
def test_runs_of_any_number_of_processes_are_one_run(root, run):
    """Two that shard from the start; one that goes on from them; three that shard and go on from one."""
    wanted, found = (read(root / name / "log.jsonl") for name in ("alone", run))
    assert len(wanted) == len(found) == 1 + 3 * 2
    for one, other in zip(wanted, found, strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() - OF_A_PROCESS:
            assert other[name] == pytest.approx(one[name], rel=1e-5, abs=1e-5), (one["step"], name)
    first, second = (checkpoints.newest(root / name) for name in ("alone", run))
    assert first is not None
    assert second is not None
    one, other = checkpoints.load(first), checkpoints.load(second)
    assert_close(states(vars(one)), states(vars(other)))
    assert one.optimizer["param_groups"] == other.optimizer["param_groups"]
    assert load_backbone(second)[0].state_dict().keys() == load_backbone(first)[0].state_dict().keys()


def test_a_launcher_with_an_fsdp_of_its_own_is_refused(monkeypatch):
    monkeypatch.setenv(sharding.LAUNCHERS_WISH, "true")
    for choice in ("none", "full"):
        with pytest.raises(UserError, match=rf"asks for FSDP .*train\.sharding={choice} decides"):
            sharding.is_asked(Config(train=schema.Train(sharding=choice)))


def test_fp16_and_numbers_without_dimensions_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"train\.sharding=full doesn't go with train\.precision=fp16"):
        sharding.is_asked(Config(train=schema.Train(sharding="full", precision="fp16")))
    assert sharding.is_asked(Config(train=schema.Train(sharding="full")))
    network = tiny()
    sharding.refuse_scalars(network)
    network.backbone.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(UserError, match=r"can't cut backbone\.scale of backbone\.name=xcit_nano_12_p4"):
        sharding.refuse_scalars(network)


def tiny() -> Network:
    options = {"embed_dim": 16, "depth": 2, "num_heads": 2}
    return build_network(
        Config(backbone=schema.Backbone("xcit_nano_12_p4", options=options), head=schema.Head(33, 24, 7))
    )


def test_units_are_the_blocks_and_the_head():
    names = [unit.__name__ for unit in sharding.unit_classes(tiny())]
    assert names == ["XCABlock", "ClassAttentionBlock", "ProjectionHead"]
