"""An XCiT small enough for any test."""

import torch

from nestling import backbones
from nestling.backbones.xcit import XCiT


def tiny(**options) -> XCiT:
    torch.manual_seed(0)
    sizes = {"embed_dim": 32, "depth": 3, "num_heads": 4, "layer_scale": 0.5}
    model = backbones.create("xcit_nano_12_p4", **{**sizes, **options})
    assert isinstance(model, XCiT)
    return model
