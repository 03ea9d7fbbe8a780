"""Feature maps at strides 4, 8, 16 and 32 from a backbone of a single stride."""

import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

STRIDES = (4, 8, 16, 32)


def pyramid_layers(stride: int, dim: int) -> list[nn.Module]:
    """The resizing layers of the published XCiT detectors, one per level of `STRIDES`.

    Each halving of the stride is a transposed convolution (batch norm and GELU between two of them);
    coarser levels are max-pooled.
    """
    layers: list[nn.Module] = []
    for level in STRIDES:
        ratio = math.log2(stride / level)
        if ratio > 0:
            doublings: list[nn.Module] = []
            for _ in range(int(ratio)):
                doublings += [nn.ConvTranspose2d(dim, dim, 2, stride=2), nn.BatchNorm2d(dim), nn.GELU()]
            layers.append(nn.Sequential(*doublings[:-2]))
        elif ratio == 0:
            layers.append(nn.Identity())
        else:
            # ceil_mode: a grid of one patch still has one cell at every coarser level
            layers.append(nn.MaxPool2d(level // stride, ceil_mode=True))
    return layers


def resize_levels(maps: Sequence[Tensor], stride: int) -> list[Tensor]:
    """The same levels without parameters: bilinear upwards, max-pooling downwards.

    Shape:
        maps: four of (B, C, h, w) -> (B, C, ceil(h * stride / s_i), ceil(w * stride / s_i))
    """
    levels = []
    for level, x in zip(STRIDES, maps, strict=True):
        if level < stride:
            levels.append(F.interpolate(x, scale_factor=stride / level, mode="bilinear"))
        else:
            levels.append(F.max_pool2d(x, level // stride, ceil_mode=True) if level > stride else x)
    return levels


def crop_levels(levels: Sequence[Tensor], height: int, width: int) -> list[Tensor]:
    """Cut what lies beyond the image where its sides are no multiples of the stride."""
    return [
        x[..., : -(-height // level), : -(-width // level)] for level, x in zip(STRIDES, levels, strict=True)
    ]
