"""What a forward costs: that all of it is measured, and nothing is touched."""

import sys
import time

import pytest
import torch

from nestling.backbones import Backbone, Features
from nestling.ssl.evaluation.resolution.cost import machine, measured


class Slow(Backbone):
    """Takes 20 ms and 64 MB for each batch, and remembers them."""

    def __init__(self):
        super().__init__()
        self.name, self.embed_dim, self.stride, self.min_size = "slow", 3, 1, 1
        self.shapes = []

    def forward(self, images, mask=None):
        self.shapes.append((*images.shape, self.training))
        torch.ones(16, 2**20).sum()
        time.sleep(0.02)
        return Features(images.mean((2, 3)), images.flatten(2).mT, images.shape[2:])

    pyramid = attention = forward


def test_speed_is_that_of_the_median_batch_and_memory_what_the_forward_needs():
    backbone = Slow().train()
    found = measured(backbone, 3, (4, 6), batch_size=5, repeats=3, device=torch.device("cpu"))
    assert set(backbone.shapes) == {(5, 3, 4, 6, False)}
    assert len(backbone.shapes) == 2 + 1 + 3  # warm-up, memory, timed
    assert 0 < found["images_per_second"] <= 5 / 0.02
    assert backbone.training
    if sys.platform.startswith("linux"):
        assert found["peak_memory_mb"] == pytest.approx(64, abs=16)


def test_the_machine_is_named():
    said = machine(torch.device("cpu"))
    assert said["host"]
    assert said["chip"]
    assert said["threads"] == torch.get_num_threads()
