"""Tokens of several crop sizes in one tensor: what treats each token alone is called once for all of them.

As DINOv2 packs sequences (Oquab et al., 2024, section 5): products are larger, their weights are read once,
and the gradients of a weight need not be added up. Only what mixes tokens takes the sizes apart.

Shapes used below: per crop size, B images of T tokens; R, the rows, is the sum of all B * T.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Sizes = tuple[tuple[int, int], ...]  # B and T of each crop size


def sizes_of(parts: Sequence[Tensor]) -> Sizes:
    """Shape: parts (B, T, ...)."""
    return tuple((part.shape[0], part.shape[1]) for part in parts)


def pack(parts: Sequence[Tensor]) -> Tensor:
    """Shape: parts (B, T, ...) -> (R, ...)."""
    return torch.cat([part.flatten(0, 1) for part in parts])


def unpack(x: Tensor, sizes: Sizes) -> list[Tensor]:
    """Shape: (R, ...) -> of each crop size (B, T, ...)."""
    parts = x.split([images * tokens for images, tokens in sizes])
    return [part.unflatten(0, size) for part, size in zip(parts, sizes, strict=True)]


def by_size(function: Callable[..., Tensor], x: Tensor, sizes: Sizes | None, *givens: Any) -> Tensor:
    """`function` of each crop size and of what is given for it; of x and what is given where x is of one.

    Shape:
        x: (R, ...) -> (R, ...) with `sizes`, else (B, T, ...) -> (B, T, ...)
    """
    if sizes is None:
        return function(x, *givens)
    return pack([function(*few) for few in zip(unpack(x, sizes), *givens, strict=True)])
