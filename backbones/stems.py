"""How an image becomes patch tokens.

Shapes used below: B images, C channels.
"""

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.backbones.dispatch import on_cpu
from nestling.backbones.gelu import MapGelu


class ConvStem(nn.Module):
    """Patches from overlapping 3x3 convolutions of stride 2 (section 3.3), log2(patch) of them.

    Each halves the sides, rounding up, so any size works; the width doubles up to `dim`. On CPUs channels
    lie innermost, which oneDNN convolves and normalises faster, and which is the order of tokens.

    Shape:
        images: (B, in_chans, H, W) -> (B, C, ceil(H / patch), ceil(W / patch))
    """

    def __init__(self, in_chans: int, dim: int, patch: int) -> None:
        super().__init__()
        num_convs = int(math.log2(patch))
        widths = [in_chans] + [dim >> (num_convs - 1 - i) for i in range(num_convs)]
        layers: list[nn.Module] = []
        for wide_in, wide_out in itertools.pairwise(widths):
            conv = nn.Conv2d(wide_in, wide_out, 3, stride=2, padding=1, bias=False)
            layers += [nn.Sequential(conv, nn.BatchNorm2d(wide_out)), MapGelu()]
        self.proj = nn.Sequential(*layers[:-1])

    def forward(self, images: Tensor) -> Tensor:
        if on_cpu(images):
            images = images.contiguous(memory_format=torch.channels_last)
        return self.proj(images)


class LinearStem(nn.Module):
    """Patches from one linear projection, as in ViT: the paper's ablation of the convolutional stem.

    An image whose sides are no multiples of the patch is padded with zeros at the bottom and right,
    so that its grid is the one of `ConvStem`.

    Shape:
        images: (B, in_chans, H, W) -> (B, C, ceil(H / patch), ceil(W / patch))
    """

    def __init__(self, in_chans: int, dim: int, patch: int) -> None:
        super().__init__()
        self.patch = patch
        self.proj = nn.Conv2d(in_chans, dim, patch, stride=patch)

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        return self.proj(F.pad(images, (0, -width % self.patch, 0, -height % self.patch)))
