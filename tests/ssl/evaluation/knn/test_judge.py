"""The judge warns of features that say nothing, and of float16 where it would decide."""

import logging

import pytest
import torch

from nestling.backbones.features import Backbone, Features
from nestling.ssl.config import Config, Data, Knn
from nestling.ssl.data.sources.folder import Folder
from nestling.ssl.evaluation.knn.judge import KnnJudge, Search


class Nearly(Backbone):
    """All images look the same but for `share` of their mean colours."""

    name, embed_dim, stride, min_size = "nearly", 3, 1, 1

    def __init__(self, share):
        super().__init__()
        self.share = share

    def forward(self, images, mask=None):
        cls = torch.ones(3) + self.share * images.mean(dim=(2, 3))
        return Features(cls, images.flatten(2).mT, (8, 8))

    def pyramid(self, images):
        raise NotImplementedError

    def attention(self, images):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("share", "on_disk", "said"),
    [
        (0.0, False, "k-NN: cls is constant (std < 1e-06) over data.train: the network has collapsed"),
        (1e-3, True, "k-NN: cls differs so little between images"),
        (1e-3, False, None),
        (1.0, True, None),
    ],
)
def test_features_that_say_little_are_warned_of(share, on_disk, said, image_folder, tmp_path, caplog):
    train, val = (
        Folder(str(image_folder(side, classes=2, per_class=3, size=8, seed=seed)))
        for seed, side in enumerate(("train", "val"))
    )
    config = Config(data=Data(num_workers=0), knn=Knn(k=[1], size=8, crop_ratio=1.0))
    search = Search(features_dir=str(tmp_path / "scratch") if on_disk else None)
    with caplog.at_level(logging.INFO, "nestling"):
        found = KnnJudge(train, val, config, search).judge(Nearly(share), torch.device("cpu"))
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [message.partition(" (std 0")[0] for message in warnings] == ([said] if said else [])
    assert list(found.results) == ["knn/cls/top1_k1"]
    assert sum(found.confusions["cls"].values()) == 6
    if share == 0:
        assert found.results["knn/cls/top1_k1"] == 0.5  # the first training image is everyone's neighbour
