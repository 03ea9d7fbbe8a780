"""A detector's pyramid from maps of whatever strides a foreign network has.

Shapes used below: B images of H x W pixels, C channels, strides s = 4, 8, 16, 32.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nestling.backbones.pyramid import STRIDES, crop_levels, resize_levels

_SHARES = (1 / 3, 1 / 2, 2 / 3, 1)  # of the depth: where XCiT's detectors read a network of one stride


def levels_of(maps: Sequence[Tensor], strides: Sequence[int], height: int, width: int) -> list[Tensor]:
    """Per level the last map of the nearest stride, resized without parameters.

    A network of a single stride gives what it holds after a third, a half, two thirds and all of it.

    Shape:
        maps: (B, C_i, h_i, w_i) each, in the network's order -> four of (B, C, ceil(H / s), ceil(W / s))
    """
    if len(set(strides)) == 1:
        picked = [maps[max(1, round(len(maps) * share)) - 1] for share in _SHARES]
        return crop_levels(resize_levels(picked, strides[0]), height, width)
    levels = []
    for level in STRIDES:
        distances = [abs(math.log2(stride / level)) for stride in strides]
        last = max(i for i, distance in enumerate(distances) if distance == min(distances))
        levels.append(_resized(maps[last], strides[last], level, (-(-height // level), -(-width // level))))
    return levels


def _resized(x: Tensor, stride: int, level: int, size: tuple[int, int]) -> Tensor:
    """Max-pooling by whole cells, then bilinear; where a map ends before the image, its border goes on."""
    pool = max(1, level // stride)
    if pool > 1:
        x = F.max_pool2d(x, pool, ceil_mode=True)
    x = x[..., : size[0], : size[1]] if stride * pool == level else x
    if x.shape[2:] == size:
        return x
    # the scale beside the size: by size alone a map that ends early would be stretched
    scale = stride * pool / level
    return torch.ops.aten.upsample_bilinear2d(x, size, False, scale, scale)
