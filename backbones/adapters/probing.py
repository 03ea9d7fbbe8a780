"""What sizes a foreign network takes: found by dry forwards, as no table would keep up.

A dry forward runs on torch's meta device: shapes without numbers, so it costs no memory and little time.
"""

import copy
import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from nestling.backbones.features import Backbone, Features

# Smallest sides that networks start at: powers of two, patches of 7, 12 and 14, common fixed sizes.
SIDES = (1, 2, 4, 7, 8, 14, 16, 28, 32, 56, 64, 96, 112, 128, 160, 192, 224, 256, 384)


class ContractError(ValueError):
    """A network gives what the contract doesn't allow; the message names the shapes found."""


class Probe:
    """A copy of a backbone in evaluation mode: on the meta device, or sharing the original's parameters."""

    def __init__(self, backbone: Backbone, in_chans: int, on_meta: bool) -> None:
        memo: dict[int, Any] = {}
        if on_meta:
            memo = {id(tensor): _shape_of(tensor) for tensor in (*backbone.parameters(), *backbone.buffers())}
        else:  # buffers are copied: a forward in training mode changes running statistics
            memo = {id(parameter): parameter for parameter in backbone.parameters()}
        try:
            self.backbone = copy.deepcopy(backbone, memo).eval()
        except Exception as error:
            raise ValueError(
                f"{backbone.name} can't be copied, as a teacher must be: {type(error).__name__}: {error}"
            ) from error
        self.in_chans = in_chans

    def features(self, height: int, width: int) -> Features:
        """Of two blank images; raises whatever the network raises, or ContractError."""
        return check_features(self.call("features", height, width), self.backbone.name)

    def call(self, method: str, height: int, width: int) -> Any:
        """What a method gives for two blank images."""
        like = next(self.backbone.parameters(), torch.empty(0))
        device, dtype = like.device, like.dtype
        with torch.device(device):  # what a forward creates without naming a device
            images = torch.zeros(2, self.in_chans, height, width, dtype=dtype)
            return getattr(self.backbone, method)(images)

    @torch.no_grad()
    def explained(self, method: str, height: int, width: int) -> Any:
        """The same, with a sentence about any failure: raises ValueError."""
        try:
            return self.call(method, height, width)
        except ContractError:
            raise
        except Exception as error:  # a foreign network may raise anything
            raise ValueError(
                f"{self.backbone.name} fails on {height} x {width} images of {self.in_chans} channels: "
                f"{type(error).__name__}: {error}"
            ) from error

    @torch.no_grad()
    def takes(self, height: int, width: int) -> bool:
        try:
            self.features(height, width)
        except Exception:  # whatever a foreign network raises, it doesn't take the size
            return False
        return True

    @torch.enable_grad()
    def unused(self, height: int, width: int) -> list[str]:
        """Names of the parameters that no output depends on, in training mode. Once for each probe."""
        self.backbone.train()  # in evaluation mode some networks keep what they made of a parameter
        features = self.features(height, width)
        named = {name: p for name, p in self.backbone.named_parameters() if p.requires_grad}
        total = features.cls.sum() + features.patches.sum()
        if not total.requires_grad:
            return list(named)
        gradients = torch.autograd.grad(total, list(named.values()), allow_unused=True)
        return [name for name, gradient in zip(named, gradients, strict=True) if gradient is None]


def _shape_of(tensor: Tensor) -> Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def check_features(found: Any, name: str) -> Features:
    """The contract, for two images: raises ContractError with the shapes found where they break it."""
    if not isinstance(found, Features):
        raise ContractError(f"{name} returns {describe(found)}, not Features")
    cls, patches, (rows, columns) = found
    if cls.shape != (2, cls.shape[-1]) or patches.shape != (2, rows * columns, cls.shape[-1]):
        raise ContractError(
            f"{name} returns cls of shape {tuple(cls.shape)} and patches of shape {tuple(patches.shape)} "
            f"with grid {(rows, columns)} for 2 images; (2, D), (2, h * w, D) and (h, w) were expected"
        )
    return found


@torch.no_grad()
def check_backbone(backbone: Backbone, in_chans: int) -> None:
    """The contract, of a backbone that claims to keep it: raises ValueError where it doesn't."""
    side = 2 * backbone.min_size
    backbone.check_size(side, side)
    name = backbone.name
    try:
        found = Probe(backbone, in_chans, on_meta=True).call("forward", side, side)
    except Exception:  # an operation without a shape rule: compute it
        found = Probe(backbone, in_chans, on_meta=False).explained("forward", side, side)
    check_features(found, name)
    if found.cls.shape[-1] != backbone.embed_dim:
        raise ContractError(
            f"{name} returns {found.cls.shape[-1]} features, where its embed_dim is {backbone.embed_dim}"
        )


def describe(found: Any) -> str:
    """In words: a tensor by its shape, a list by its members."""
    if isinstance(found, Tensor):
        return f"a tensor of shape {tuple(found.shape)}"
    if isinstance(found, list | tuple) and len(found) <= 4:
        return f"a {type(found).__name__} of {' and '.join(map(describe, found)) or 'nothing'}"
    return f"an object of type {type(found).__name__}"


def near_sizes(height: int, width: int, units: set[int]) -> Iterator[tuple[int, int]]:
    """Sizes worth a try, the nearest first: sides rounded to multiples of the units, and squares."""
    sizes: set[tuple[int, int]] = set()
    for unit in units:
        tall, wide = ({max(side // unit, 1) * unit, -(-side // unit) * unit} for side in (height, width))
        sizes |= {*product(tall, wide), *((side, side) for side in tall | wide)}
    yield from sorted(sizes, key=lambda size: (abs(size[0] - height) + abs(size[1] - width), size))


def grid_of(num_patches: int, height: int, width: int, stride: int, name: str) -> tuple[int, int]:
    """The grid that a row of patches was, for networks that pad the image and for those that cut it.

    Raises ContractError where no such grid has that many patches.
    """
    padded = (-(-height // stride), -(-width // stride))
    cut = (height // stride, width // stride)
    for grid in (padded, cut):
        if grid[0] * grid[1] == num_patches:
            return grid
    raise ContractError(
        f"{name} gives {num_patches} patches for an image of {height} x {width} pixels, "
        f"where its stride of {stride} gives {padded[0]} x {padded[1]}"
    )


def stride_of(side: int, cells: int) -> int:
    """Pixels per cell: the power of two that explains the cells, else what is nearest.

    9 cells of 299 pixels are a stride of 32 without padding, not one of 34.
    """
    power = 2 ** round(math.log2(side / cells))
    return power if cells in (side // power, -(-side // power)) else -(-side // cells)
