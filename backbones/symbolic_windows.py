"""Swin's windows in an export with dynamic sizes: the same tokens by index, so one graph serves all sizes.

How many windows there are, and so whether they shift, is known only when the graph runs: here no step
branches on a size, and no symbolic dimension is split. A window never shrinks: with masked padding that
gives the same numbers.

Shapes used below: as in `windows`.
"""

import operator

import torch
from torch import Tensor

from nestling.backbones.windows import Axis, Windows, as_tensor, cut_axis, token_places


class SymbolicWindows(Windows):
    """`Windows` over symbolic sizes; the layout between `cut` and `join` is (B, W, T, C).

    Needs a spare window: an export tells a dimension that may be 1 from all others, and W then never is.
    """

    @property
    def need_mask(self) -> bool:
        return True

    def cut(self, x: Tensor) -> Tensor:
        """Shape: x (B, h, w, C) -> (B, W, T, C)."""
        row, column = token_places(self, x.device)
        real = (row < self.rows.length) & (column < self.columns.length)
        row, column = row.clamp(max=self.rows.length - 1), column.clamp(max=self.columns.length - 1)
        return x[:, row, column] * real[..., None].to(x.dtype)

    def join(self, x: Tensor) -> Tensor:
        """Shape: x (B, W, T, C) -> (B, h, w, C)."""
        row, column = (
            (torch.arange(axis.length, device=x.device) - axis.shift) % as_tensor(axis.padded, x.device)
            for axis in (self.rows, self.columns)
        )
        high, wide = self.size
        window = (row // high)[:, None] * self.columns.num_windows + column // wide
        token = (row % high)[:, None] * wide + column % wide
        return x[:, window, token]

    def split_heads(self, qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """Shape: qkv (B, W, T, 3 C) -> three of (B, W H, T, D)."""
        q, k, v = qkv.unflatten(-1, (3, num_heads, -1)).permute(3, 0, 1, 4, 2, 5).flatten(2, 3).unbind()
        return q, k, v

    def merge_heads(self, x: Tensor, batch: int, num_heads: int) -> Tensor:
        """Shape: x (B, W H, T, D) -> (B, W, T, C)."""
        return x.unflatten(1, (self.number, num_heads)).transpose(2, 3).flatten(3)


def settle(*sizes: int) -> None:
    """Have torch.compile make one graph a size: with windows, sizes it keeps symbolic take it minutes."""
    for size in sizes:
        if not isinstance(size, torch.SymInt):  # of an export with dynamic sizes, which must stay symbolic
            operator.index(size)  # a plain int; where torch.compile traces, it makes one of a symbolic one


def cut_grid(grid: tuple[int, int], size: int, shifted: bool, masked: bool) -> Windows:
    """The windows of a grid, whether its sizes are known or symbolic."""
    if any(isinstance(length, torch.SymInt) for length in grid):
        rows, columns = (_cut_symbolic_axis(length, size, shifted) for length in grid)
        return SymbolicWindows(rows, columns, masked, spare=1)
    rows, columns = (cut_axis(length, size, shifted, shrink=masked) for length in grid)
    return Windows(rows, columns, masked)


def _cut_symbolic_axis(length: int, size: int, shifted: bool) -> Axis:
    num_windows = (length - 1) // size + 1
    alone = 1 // num_windows  # 1 for a single window, which is never shifted, else 0
    return Axis(length, size, num_windows, size // 2 * (1 - alone) if shifted else 0)
