"""Tokens of several crop sizes in one tensor: what treats each token alone is called once for all of them.

As DINOv2 packs sequences (Oquab et al., 2024, section 5): products are larger, their weights are read once,
and the gradients of a weight need not be added up. Only what mixes tokens takes the sizes apart.

Shapes used below: per crop size, B images of T tokens, or of a grid of h x w = T; R, the rows, is the sum of
all B * T.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Sizes = tuple[tuple[int, ...], ...]  # (B, T) or (B, h, w) of each crop size


def pack(parts: Sequence[Tensor], dims: int = 2) -> tuple[Tensor, Sizes]:
    """Those of which the first `dims` dimensions are a size, and their sizes.

    Shape:
        parts: (B, T, ...) or (B, h, w, ...) -> (R, ...)
    """
    return rows_of(parts, dims), tuple(tuple(part.shape[:dims]) for part in parts)


def rows_of(parts: Sequence[Tensor], dims: int = 2) -> Tensor:
    """Shape: parts (B, T, ...) or (B, h, w, ...) -> (R, ...)."""
    return torch.cat([part.flatten(0, dims - 1) for part in parts])


def unpack(x: Tensor, sizes: Sizes) -> list[Tensor]:
    """Shape: (R, ...) -> of each crop size (B, T, ...) or (B, h, w, ...)."""
    parts = x.split([math.prod(size) for size in sizes])
    return [part.unflatten(0, size) for part, size in zip(parts, sizes, strict=True)]


def by_size(function: Callable[..., Tensor], x: Tensor, sizes: Sizes | None, *givens: Any) -> Tensor:
    """`function` of each crop size and of what is given for it; of x and what is given where x is of one.

    Shape:
        x: (R, ...) -> (R, ...) with `sizes`, else (B, T, ...) -> (B, T, ...) or of grids
    """
    if sizes is None:
        return function(x, *givens)
    results = [function(*few) for few in zip(unpack(x, sizes), *givens, strict=True)]
    return rows_of(results, len(sizes[0]))
