"""How Swin cuts a grid of tokens into windows (Liu et al., 2021, sections 3.2 and 3.3).

Shapes used below: B images, h x w grid of tokens, M x M window of T tokens, W windows, row-major,
C channels, H heads, D = C / H.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nestling.backbones.dispatch import holds_numbers


class Axis(NamedTuple):
    """One axis of the grid: `num_windows` windows cover it, the first one `shift` tokens after its start."""

    length: int
    window: int
    num_windows: int
    shift: int

    @property
    def padded(self) -> int:
        return self.num_windows * self.window


def cut_axis(length: int, size: int, shifted: bool, shrink: bool) -> Axis:
    """The windows along an axis: `size` tokens long; with `shrink`, no longer than the axis itself.

    Shifted windows start half a window later; where a single window covers the axis, none is shifted.
    """
    window = min(length, size) if shrink else size
    num_windows = -(-length // window)
    return Axis(length, window, num_windows, window // 2 if shifted and num_windows > 1 else 0)


class Windows(NamedTuple):
    """A grid cut into windows: rows, columns, and whether padded tokens get no attention weight.

    Plain numbers, so that it can be the key of a cache. `spare` windows at the end belong to no place.
    """

    rows: Axis
    columns: Axis
    masked: bool
    spare: int = 0

    @property
    def size(self) -> tuple[int, int]:
        return self.rows.window, self.columns.window

    @property
    def number(self) -> int:
        return self.rows.num_windows * self.columns.num_windows + self.spare

    @property
    def is_padded(self) -> bool:
        return any(axis.padded > axis.length for axis in (self.rows, self.columns))

    @property
    def need_mask(self) -> bool:
        """Whether a window may hold two tokens that must not see each other."""
        return bool(self.rows.shift or self.columns.shift or (self.masked and self.is_padded))

    def cut(self, x: Tensor) -> Tensor:
        """Pad with zeros at the bottom and right, shift, and see the grid as windows.

        Shape:
            x: (B, h, w, C) -> (B, W rows, M, W columns, M, C)
        """
        rows, columns = self.rows, self.columns
        missing = rows.padded - rows.length, columns.padded - columns.length
        if any(missing):
            x = F.pad(x, (0, 0, 0, missing[1], 0, missing[0]))
        shape = (x.shape[0], rows.num_windows, rows.window, columns.num_windows, columns.window, x.shape[-1])
        return self._roll(x, -1).reshape(shape)

    def join(self, x: Tensor) -> Tensor:
        """Undo `cut`; what the padded tokens received is dropped.

        Shape:
            x: (B, W rows, M, W columns, M, C) -> (B, h, w, C)
        """
        x = x.reshape(x.shape[0], self.rows.padded, self.columns.padded, x.shape[-1])
        return self._roll(x, 1)[:, : self.rows.length, : self.columns.length]

    def split_heads(self, qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of every window: one copy for the three, none where W = 1.

        Where windows need masks, which differ between them, they go with the heads.

        Shape:
            qkv: (B, W rows, M, W columns, M, 3 C) -> three of (B W, H, T, D) or of (B, W H, T, D)
        """
        x = qkv.unflatten(-1, (3, num_heads, -1)).permute(5, 0, 1, 3, 6, 2, 4, 7)
        q, k, v = x.flatten(5, 6).flatten(*((2, 4) if self.need_mask else (1, 3))).unbind()
        return q, k, v

    def merge_heads(self, x: Tensor, batch: int, num_heads: int) -> Tensor:
        """Undo `split_heads`.

        Shape:
            x: (B W, H, T, D) or (B, W H, T, D) -> (B, W rows, M, W columns, M, C)
        """
        places = (self.rows.num_windows, self.columns.num_windows, num_heads, *self.size)
        x = x.reshape(batch, *places, x.shape[-1])
        return x.permute(0, 1, 4, 2, 5, 3, 6).flatten(5)

    def _roll(self, x: Tensor, sign: int) -> Tensor:
        shifts = {dim: sign * axis.shift for dim, axis in ((1, self.rows), (2, self.columns)) if axis.shift}
        return torch.roll(x, list(shifts.values()), list(shifts)) if shifts else x


def token_places(windows: Windows, device: torch.device) -> tuple[Tensor, Tensor]:
    """The row and the column of each window's tokens on the padded grid. Shape: two of (W, T)."""
    (rows, columns), (high, wide) = (windows.rows, windows.columns), windows.size
    window = torch.arange(windows.number, device=device)[:, None]
    token = torch.arange(high * wide, device=device)
    in_a_row = as_tensor(columns.num_windows, device)
    row = window // in_a_row * high + token // wide + rows.shift
    column = window % in_a_row * wide + token % wide + columns.shift
    return row % as_tensor(rows.padded, device), column % as_tensor(columns.padded, device)


def as_tensor(number: int, device: torch.device) -> Tensor:
    """A divisor that ONNX also takes where it is symbolic."""
    return torch.full((), number, dtype=torch.int64, device=device)


def attention_mask(windows: Windows, device: torch.device) -> Tensor:
    """Which tokens of a window see which (section 3.3, "efficient batch computation").

    After the shift a window at the end of an axis also holds tokens from the axis' start: each part sees
    itself alone. With masked padding a real token sees real tokens only; a padded one sees all of its
    part, since a softmax over nothing would be nan, and what it receives is dropped.

    Shape:
        returns (W, T, T), bool, true where the query (dim 1) sees the key (dim 2)
    """
    row, column = token_places(windows, device)
    part = (row < windows.rows.shift) * 2 + (column < windows.columns.shift)
    mask = part[:, :, None] == part[:, None]
    if windows.masked:
        real = (row < windows.rows.length) & (column < windows.columns.length)
        mask = mask & (real[:, None] | ~real[:, :, None])
    return mask


def relative_position_index(window: tuple[int, int], size: int, device: torch.device) -> Tensor:
    """Where each pair of tokens of a window reads the bias table (section 3.2, equation 4).

    The table holds one row for each offset (dy, dx) = query - key of an M x M window, row-major:
    (dy + M - 1) * (2 M - 1) + dx + M - 1, as in the published weights. A window that shrank reads the
    same rows for the same offsets.

    Shape:
        returns (T, T), query by key, T = window[0] * window[1]
    """
    y, x = (torch.arange(side, device=device) for side in window)
    dy = (y[:, None] - y)[:, None, :, None]  # of the query's row and the key's row
    dx = (x[:, None] - x)[None, :, None, :]
    index = (dy + size - 1) * (2 * size - 1) + dx + size - 1
    return index.flatten(2).flatten(0, 1)


@lru_cache(maxsize=128)
def _kept(build: Callable[..., Tensor], *arguments: object) -> Tensor:
    with torch.inference_mode(False):  # a tensor made in inference mode could never be used in training
        return build(*arguments)


def kept(like: Tensor, build: Callable[..., Tensor], *arguments: object) -> Tensor:
    """`build(*arguments, like.device)`, built once and kept for the next call.

    A tensor that holds no numbers (meta, fake, of a graph being traced, of a transform) is never kept, and
    never mixed with one that does: in a compiled or exported graph it is built inside the graph.
    """
    arguments = (*arguments, like.device)
    return _kept(build, *arguments) if holds_numbers(like) else build(*arguments)
