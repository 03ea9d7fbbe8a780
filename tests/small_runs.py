"""Small runs in this process: their settings, and a backbone that takes a batch in any parts alike."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from nestling.backbones import Backbone, Features
from nestling.backbones.registry import _REGISTRY, register
from nestling.ssl import config as schema
from nestling.ssl.config import Config
from nestling.ssl.pretraining import pretrain
from nestling.ssl.run import checkpoints
from nestling.ssl.run.log import read

TIMES = ("images_per_second", "data_wait")


class TwoLayers(Backbone):
    """A backbone without batch norm, whose gradients do not depend on how a batch is split."""

    def __init__(self, name: str, drop_path: float = 0.0) -> None:
        super().__init__()
        self.name, self.embed_dim, self.stride, self.min_size = name, 12, 4, 4
        self.stem = nn.Conv2d(3, 12, 4, stride=4)
        self.mix = nn.Linear(12, 12)
        self.dropout = nn.Dropout(drop_path)

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Features:
        x = self.stem(images)
        tokens = self.dropout(self.mix(x.flatten(2).mT.tanh()))
        return Features(tokens.mean(dim=1), tokens, (x.shape[2], x.shape[3]))

    def pyramid(self, images: Tensor) -> list[Tensor]:
        raise ValueError("none")

    def attention(self, images: Tensor) -> Tensor:
        return self.forward(images).patches.mean(dim=-1)[:, None].unflatten(-1, self.forward(images).grid)


class Witness(TwoLayers):
    """The same, which remembers the shapes of all images that its student was shown."""

    shown: ClassVar[list[tuple[int, ...]]] = []

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Features:
        if self.training:  # the teacher and what is judged evaluate
            self.shown.append(tuple(images.shape))
        return super().forward(images, mask)


@contextmanager
def registered() -> Iterator[None]:
    """Both by name, as two_layers and witness."""
    register({"two_layers": {}})(TwoLayers)
    register({"witness": {}})(Witness)
    Witness.shown.clear()
    try:
        yield
    finally:
        _REGISTRY.pop("two_layers")
        _REGISTRY.pop("witness")


def config(
    data: Path, out: Path, *, name: str = "two_layers", color_on: str = "auto", **train: object
) -> Config:
    tiny = {"embed_dim": 16, "depth": 1, "num_heads": 2} if name.startswith("xcit") else {}
    return Config(
        out=str(out),
        data=schema.Data(train=str(data), num_workers=0, holdout=0.25),
        backbone=schema.Backbone(name, 0.1, options=tiny),
        views=schema.Views(global_size=[16], num_local=2, local_size=[8], color_on=color_on),
        head=schema.Head(num_prototypes=24, hidden_dim=16, bottleneck_dim=8, freeze_epochs=1),
        teacher=schema.Teacher(temperature=0.07, temperature_warmup_epochs=2, momentum=0.9),
        optim=schema.Optim(lr=1e-2, lr_scaling="none", warmup_epochs=1),
        train=schema.Train(**{"epochs": 3, "batch_size": 8, "precision": "fp32", **train}),
        knn=schema.Knn(k=[3], size=16, crop_ratio=1.0),
        log=schema.Log(every=1, progress="none"),
    )


def trained(settings: Config) -> tuple[checkpoints.Checkpoint, list[dict[str, float]]]:
    run = pretrain(settings)
    records = [{k: v for k, v in r.items() if k not in TIMES} for r in read(run / "log.jsonl")]
    newest = checkpoints.newest(run)
    assert newest is not None
    return checkpoints.load(newest), records


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor], atol: float = 0.0) -> None:
    assert left.keys() == right.keys()
    for key in left:
        torch.testing.assert_close(left[key], right[key], rtol=0, atol=atol)
