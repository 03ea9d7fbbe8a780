"""A learned table of positions, read at any grid.

Bicubic interpolation is written as two small matrix products: one way for eager and exported graphs
with dynamic sizes, and a backward pass that repeats to the bit where torch's own, on CUDA, does not.

Shapes used below: S x S cells of the table, h x w grid of N patches, C channels.
"""

import math

import torch
from torch import Tensor


def resize_positions(
    table: Tensor, grid: tuple[int, int], offset: float = 0.0, antialias: bool = False
) -> Tensor:
    """The table at the centres of an h x w grid laid over it: bicubic, in fp32 at least.

    The result has the grid's size whatever the offset. With an `offset` neighbouring samples lie
    S / (h + offset) cells apart instead of S / h: DINO and DINOv2 (0.1) asked for a grid that much larger
    lest rounding lost a row. At the table's own grid the result is the table, bit for bit, in every setting.

    Shape:
        table: (S * S, C) -> (N, C)
    """
    side = math.isqrt(len(table))
    # An exported graph serves every size: comparing there would fix the one it is exported at.
    if not torch.compiler.is_exporting() and grid == (side, side):
        return table
    dtype = torch.promote_types(table.dtype, torch.float32)
    rows, columns = (torch.full((), length, dtype=dtype, device=table.device) for length in grid)
    shift = offset * ((rows != side) | (columns != side)).to(dtype)
    weights_rows, weights_columns = (
        cubic_weights(length, side, side / (length_as_tensor + shift), antialias)
        for length, length_as_tensor in zip(grid, (rows, columns), strict=True)
    )
    device_type = "cpu" if table.is_meta else table.device.type  # autocast knows no meta device
    with torch.autocast(device_type, enabled=False):
        x = (weights_rows @ table.to(dtype).unflatten(0, (side, side)).flatten(1)).unflatten(1, (side, -1))
        x = weights_columns @ x  # h w C
    return x.flatten(0, 1).to(table.dtype)


def cubic_weights(length: int, side: int, step: Tensor, antialias: bool) -> Tensor:
    """The weight of each of a line's `side` cells in each of `length` samples lying `step` cells apart.

    Plain: four cells around the sample (Keys' kernel, a = -0.75), the outermost cells repeated beyond
    the border. Antialiased: the kernel (a = -0.5) widens with the step where that is above 1, and what
    lies beyond the border is left out. Both as torch interpolates.

    Shape:
        step: () -> (length, side)
    """
    cells = torch.arange(side, dtype=step.dtype, device=step.device)
    centers = (torch.arange(length, dtype=step.dtype, device=step.device) + 0.5) * step - 0.5
    if antialias:
        weights = cubic((cells - centers[:, None]) / step.clamp_min(1.0), a=-0.5)
        return weights / weights.sum(dim=-1, keepdim=True)
    taps = centers.floor()[:, None] + torch.arange(-1, 3, dtype=step.dtype, device=step.device)  # length 4
    weights = cubic(centers[:, None] - taps, a=-0.75)
    hits = taps.clamp(0, side - 1)[..., None] == cells  # length 4 S
    return (weights[..., None] * hits).sum(dim=1)


def cubic(distance: Tensor, a: float) -> Tensor:
    """Keys' interpolation kernel (1981): 1 at 0, exactly 0 at every other integer."""
    x = distance.abs()
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = a * (((x - 5) * x + 8) * x - 4)
    return torch.where(x <= 1, near, torch.where(x < 2, far, torch.zeros_like(x)))
