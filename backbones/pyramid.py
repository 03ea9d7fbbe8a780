"""Feature maps at strides 4, 8, 16 and 32 from a backbone of a single stride."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STRIDES = (4, 8, 16, 32)


def level_ends(depth: int) -> list[int]:
    """After how many of `depth` blocks each level is read: a third, a half, two thirds, all (XCiT, BEiT)."""
    return [max(1, round(depth * share)) for share in (1 / 3, 1 / 2, 2 / 3, 1)]


def pyramid_layers(stride: int, dim: int) -> list[nn.Module]:
    """The resizing layers of the published XCiT detectors, one per level of `STRIDES`.

    Each halving of the stride is a transposed convolution (batch norm and GELU between two of them);
    coarser levels are max-pooled. A stride that is no power of two, as 14, comes as close to its
    levels as halving and doubling can; `fit_levels` does the rest.
    """
    layers: list[nn.Module] = []
    for level in STRIDES:
        halvings = _halvings(stride, level)
        if halvings > 0:
            doublings: list[nn.Module] = []
            for _ in range(halvings):
                doublings += [nn.ConvTranspose2d(dim, dim, 2, stride=2), nn.BatchNorm2d(dim), nn.GELU()]
            layers.append(nn.Sequential(*doublings[:-2]))
        elif halvings == 0:
            layers.append(nn.Identity())
        else:
            # ceil_mode: a grid of one patch still has one cell at every coarser level
            layers.append(nn.MaxPool2d(2**-halvings, ceil_mode=True))
    return layers


def resize_levels(maps: Sequence[Tensor], stride: int) -> list[Tensor]:
    """The same levels without parameters: max-pooling downwards, bilinear for the rest of the way.

    Shape:
        maps: four of (B, C, h, w) -> (B, C, ceil(h * stride / s_i), ceil(w * stride / s_i))
    """
    levels = []
    for level, x in zip(STRIDES, maps, strict=True):
        size = _level_size(x.shape[2] * stride, x.shape[3] * stride, level)
        pool = 2 ** max(0, -_halvings(stride, level))
        if pool > 1:
            x = F.max_pool2d(x, pool, ceil_mode=True)
        levels.append(_resample(x, stride * pool, level, size))
    return levels


def fit_levels(levels: Sequence[Tensor], stride: int, height: int, width: int) -> list[Tensor]:
    """Levels as `pyramid_layers` leaves them, resampled where halving and doubling miss a level's stride.

    Cut at the image's border, as by `crop_levels`.

    Shape:
        levels: four of (B, C, h_i, w_i) -> (B, C, ceil(height / s_i), ceil(width / s_i))
    """
    return [
        _resample(x, stride / 2 ** _halvings(stride, level), level, _level_size(height, width, level))
        for level, x in zip(STRIDES, levels, strict=True)
    ]


def crop_levels(levels: Sequence[Tensor], height: int, width: int) -> list[Tensor]:
    """Cut what lies beyond the image where its sides are no multiples of the stride."""
    return [
        x[..., : -(-height // level), : -(-width // level)] for level, x in zip(STRIDES, levels, strict=True)
    ]


def _halvings(stride: int, level: int) -> int:
    """How often to halve the stride (below 0: to double it) to come closest to the level's."""
    return round(math.log2(stride / level))


def _level_size(height: int, width: int, level: int) -> tuple[int, int]:
    return -(-height // level), -(-width // level)


def _resample(x: Tensor, stride: float, level: int, size: tuple[int, int]) -> Tensor:
    """Bilinear, from one cell each `stride` pixels to one each `level`, pixel for pixel in place."""
    if stride == level:
        return x[..., : size[0], : size[1]]
    # interpolate() takes a size or a scale: by size alone a map that overhangs the image would be squeezed
    return torch.ops.aten.upsample_bilinear2d(x, size, False, stride / level, stride / level)
