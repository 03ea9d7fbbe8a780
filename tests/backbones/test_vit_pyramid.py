"""ViT's feature maps for detectors, for patches that are a power of two and for 14."""

import math

import pytest
import torch
from torch import Tensor

from nestling import backbones
from nestling.backbones.pyramid import fit_levels, resize_levels
from nestling.backbones.vit import ViT


def tiny(name: str, **options) -> ViT:
    torch.manual_seed(0)
    sizes = {"embed_dim": 32, "depth": 3, "num_heads": 2}
    model = backbones.create(name, **{**sizes, **options})
    assert isinstance(model, ViT)
    return model


@pytest.mark.parametrize("with_layers", [False, True])
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("vit_tiny_p16", (64, 48)),
        ("vit_tiny_p16", (16, 80)),
        ("vit_tiny_p14", (14, 14)),
        ("vit_tiny_p14", (56, 42)),
        ("vit_tiny_p14", (98, 238)),
        ("vit_tiny_p8", (40, 8)),
    ],
)
def test_pyramid_has_every_stride_exactly(name, size, with_layers):
    model = tiny(name, pyramid=with_layers)
    levels = model.pyramid(torch.randn(2, 3, *size))
    expected = [(2, 32, math.ceil(size[0] / s), math.ceil(size[1] / s)) for s in (4, 8, 16, 32)]
    assert [tuple(level.shape) for level in levels] == expected
    sum(level.sum() for level in levels).backward()
    assert all(level.isfinite().all() for level in levels)
    if with_layers:
        assert all(p.grad is not None for key, p in model.named_parameters() if key.startswith("fpn"))


def test_the_levels_of_patch_14_lie_where_their_pixels_are():
    def centers(cells: int, stride: float) -> Tensor:
        return ((torch.arange(cells) + 0.5) * stride).expand(1, 1, 3, -1)

    width = 14 * 9
    without_layers = resize_levels([centers(9, 14)] * 3 + [torch.zeros(1, 1, 3, 9)], 14)
    as_layers_leave = [centers(36, 3.5), centers(18, 7), centers(9, 14), torch.zeros(1, 1, 3, 5)]
    for levels in (without_layers, fit_levels(as_layers_leave, 14, 42, width)):
        for level, stride in zip(levels[:3], (4, 8, 16), strict=True):
            expected = centers(math.ceil(width / stride), stride)[0, 0, 0]
            inside = (expected > 7) & (expected < width - 7)  # beyond the outermost centres values repeat
            torch.testing.assert_close(level[0, 0, 0][inside], expected[inside])


def test_pyramid_maps_come_from_the_blocks_of_the_published_detectors():
    model = tiny("vit_tiny_p16", depth=12).eval()
    outputs: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, output: outputs.append(output[:, 1:]))
    level = model.pyramid(torch.randn(1, 3, 32, 48))[2]  # stride 16: as it is, after two thirds
    torch.testing.assert_close(level.flatten(2).mT, outputs[7])
