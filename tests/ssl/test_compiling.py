"""Compiled blocks: the numbers of a run without, whatever else is on, and one sentence where it fails."""

import copy
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from config_observers import left_as_found
from image_folder import write_image_folder
from torch import Tensor, nn

from nestling import backbones
from nestling.backbones import Backbone, Features
from nestling.backbones.layers import DropPath
from nestling.backbones.registry import _REGISTRY, register
from nestling.ssl import compiling
from nestling.ssl import config as schema
from nestling.ssl.config import Config
from nestling.ssl.distillation import SelfDistillation
from nestling.ssl.errors import UserError
from nestling.ssl.pretraining import pretrain
from nestling.ssl.run import checkpoints
from nestling.ssl.run.log import read
from nestling.ssl.validation import validate

SMALL = {"embed_dim": 16, "depth": 2, "num_heads": 2}
LIMITS = ("recompile_limit", "accumulated_recompile_limit", "optimize_ddp")
# torch looks at .grad of a block's input, and hides what it warns of then from users alone.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.drop_path = nn.Linear(12, 12), nn.Linear(12, 12), DropPath(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.fc1(x).tanh()) * (self.drop_path(x) if self.training else 1)


class TwoBlocks(Backbone):
    """As little as there can be to compile."""

    def __init__(self, name: str, drop_path: float = 0.0) -> None:
        super().__init__()
        self.name, self.embed_dim, self.stride, self.min_size = name, 12, 4, 4
        self.stem = nn.Conv2d(3, 12, 4, stride=4)
        self.blocks = nn.ModuleList(Residual() for _ in range(2))

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Features:
        x = self.stem(images)
        tokens = x.flatten(2).mT
        for block in self.blocks:
            tokens = self.run(block, tokens)
        return Features(tokens.mean(dim=1), tokens, (x.shape[2], x.shape[3]))

    def pyramid(self, images: Tensor) -> list[Tensor]:
        raise ValueError("none")

    def attention(self, images: Tensor) -> Tensor:
        return self.forward(images).patches.mean(dim=-1)[:, None].unflatten(-1, self.forward(images).grid)


@pytest.fixture(autouse=True)
def limits_as_before() -> Iterator[None]:
    from torch._dynamo import config as dynamo

    with dynamo.patch({name: getattr(dynamo, name) for name in LIMITS}):
        yield


@pytest.fixture
def two_blocks() -> Iterator[str]:
    register({"two_blocks": {}})(TwoBlocks)
    yield "two_blocks"
    _REGISTRY.pop("two_blocks")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_image_folder(tmp_path_factory.mktemp("images"), classes=2, per_class=8, size=20)


def config(images: Path, out: Path, compiled: str, name: str, **train: object) -> Config:
    """A run of two steps, judged at a size of its own."""
    return Config(
        out=str(out),
        data=schema.Data(train=str(images), num_workers=0, holdout=0.25),
        backbone=schema.Backbone(name, 0.3, dict(SMALL) if name.startswith("xcit") else {}),
        views=schema.Views(global_size=[16], num_local=2, local_size=[8]),
        head=schema.Head(num_prototypes=24, hidden_dim=16, bottleneck_dim=8, freeze_epochs=0),
        optim=schema.Optim(lr=1e-2, lr_scaling="none", warmup_epochs=0),
        train=schema.Train(
            **{"epochs": 2, "batch_size": 12, "precision": "fp32", "compile": compiled, **train}
        ),
        knn=schema.Knn(k=[3], size=20, crop_ratio=1.0),
        log=schema.Log(every=1, progress="none"),
    )


def losses(settings: Config) -> list[float]:
    with left_as_found():
        return [record["loss"] for record in read(pretrain(settings) / "log.jsonl") if "loss" in record]


def num_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_compiled_machine_code_learns_the_same_and_draws_the_same_paths_to_drop(two_blocks, images, tmp_path):
    plain, compiled = (
        losses(config(images, tmp_path / kind, kind, two_blocks)) for kind in ("none", "blocks")
    )
    assert len(plain) == 2
    assert compiled == pytest.approx(plain, abs=1e-5)


@pytest.mark.slow
def test_a_run_goes_on_compiled_or_not_with_activations_computed_twice_or_not(images, tmp_path):
    """Through all of torch.compile but the machine code, which takes minutes for XCiT."""
    name = "xcit_nano_12_p4"
    plain = losses(config(images, tmp_path / "none", "none", name, keep_last=9))
    with torch.compiler.set_stance(force_backend="aot_eager"):
        before = num_graphs()
        found = losses(config(images, tmp_path / "blocks", "blocks", name, keep_last=9))
        # One for the trial; XCA blocks for the student of two sizes at once and the teacher of one; two kinds
        # of class-attention blocks, the last of them for the class token alone, for each of these sizes.
        # Blocks of a kind share theirs, and k-NN, which is shown a third size, compiles none.
        assert num_graphs() - before == 1 + 2 + 2 * 3
        assert found == pytest.approx(plain, abs=1e-5)
        for start, then in (("none", "blocks"), ("blocks", "none")):
            begun = tmp_path / f"{start}_then_{then}"
            shutil.copytree(tmp_path / start, begun, symlinks=True)
            shutil.rmtree(checkpoints.saved(begun)[-1])
            going_on = config(images, begun, then, name, keep_last=9, activation_checkpointing=True)
            going_on.resume = "auto"
            assert losses(going_on) == pytest.approx(plain, abs=1e-5)


def test_blocks_of_all_rates_of_drop_path_share_a_graph():
    backbone = backbones.create("vit_tiny_p16", drop_path=0.3, patch=4, depth=4, embed_dim=16, num_heads=2)
    before = num_graphs()
    for block in backbone.train().blocks:
        block.compile(dynamic=False, backend="eager")
    backbone(torch.zeros(2, 3, 8, 8))
    assert num_graphs() - before == 2, "with drop path and, for the first block, without"


def test_compiling_in_place_changes_no_name_and_no_copy(images, tmp_path):
    settings = config(images, tmp_path / "run", "blocks", "xcit_nano_12_p4")
    method = SelfDistillation(settings)
    names = list(method.state_dict())
    compiling.compile_blocks(method, settings)
    assert list(method.state_dict()) == names
    compiled, copied = (
        [module._compiled_call_impl is not None for module in network.modules()]
        for network in (method, copy.deepcopy(method))
    )
    assert sum(compiled) == 2 * (2 + 2)
    assert not any(copied)


@pytest.mark.slow
def test_a_machine_without_a_compiler_is_told_in_one_sentence_before_any_work(tmp_path):
    wishes = ["train.compile=blocks", f"out={tmp_path / 'run'}", f"data.train={tmp_path / 'nothing'}"]
    environment = {
        **os.environ,
        "CXX": "no-such-compiler",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
    }
    command = [sys.executable, "-m", "nestling.recipes.dino_xcit", *wishes]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith(
        "error: train.compile=blocks: torch.compile fails for the smallest function on cpu"
    )
    assert "it needs a C++ compiler" in line
    assert "no-such-compiler" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "train", "message"),
    [
        ("torchvision:vgg11", {}, "train.compile=blocks: backbone.name=torchvision:vgg11 repeats no block"),
        (
            "torchvision:resnet18",
            {"activation_checkpointing": True},
            "train.compile=blocks doesn't go with train.activation_checkpointing=true for "
            "backbone.name=torchvision:resnet18",
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused(tmp_path, name, train, message):
    settings = config(tmp_path, tmp_path / "run", "blocks", name, **train)
    settings.views = schema.Views(global_size=[64], num_local=0)
    settings.knn.size, settings.backbone.drop_path = 64, 0.0
    with pytest.raises(UserError, match=re.escape(message)):
        validate(settings)
