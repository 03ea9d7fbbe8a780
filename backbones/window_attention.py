"""Attention within windows, and its bias by relative position (Swin, Liu et al., 2021, section 3.2).

Shapes used below: B images, h x w grid of tokens, M x M window of T tokens, W windows, C channels,
H heads, D = C / H.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.backbones.dispatch import transformed
from nestling.backbones.gathered_windows import attend, can_gather
from nestling.backbones.linear import Linear
from nestling.backbones.packing import Sizes, by_size
from nestling.backbones.symbolic_windows import cut_grid
from nestling.backbones.windows import Windows, attention_mask, kept, relative_position_index


class WindowAttention(nn.Module):
    """Attention within windows of M x M tokens (section 3.2): its cost is linear in N.

    softmax(q k^T / sqrt(D) + bias) v, the bias read from a table by the tokens' offset. `shifted` windows
    start half a window later. `masked` padding gets no attention weight, which at a grid below the
    window is the same as a smaller window, and computed so; otherwise it is attended as zeros.

    Shape:
        x: (B, h, w, C) -> (B, h, w, C); with `sizes` (R, C) -> (R, C)
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        window: int,
        shifted: bool = False,
        masked: bool = True,
        relative: bool = True,
        qkv_bias: bool = True,
    ) -> None:
        super().__init__()
        self.num_heads, self.window, self.shifted, self.masked = num_heads, window, shifted, masked
        self.relative_position_bias_table: nn.Parameter | None = None
        if relative:
            self.relative_position_bias_table = nn.Parameter(torch.empty((2 * window - 1) ** 2, num_heads))
            nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)
        self.qkv = Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = Linear(dim, dim)

    def forward(self, x: Tensor, sizes: Sizes | None = None) -> Tensor:
        if can_gather(x):
            return self.proj(by_size(self.gathered, self.qkv(x), sizes))
        return by_size(lambda x: self.within(self.windows(x), x), x, sizes)

    def gathered(self, qkv: Tensor) -> Tensor:
        """As `within`, faster on a CPU, of projected tokens. Shape: qkv (B, h, w, 3 C) -> (B, h, w, C)."""
        windows = self.windows(qkv)
        bias = self.bias(windows.size, qkv, torch.promote_types(qkv.dtype, torch.float32))
        if windows.need_mask:
            mask = kept(qkv, attention_mask, windows)[:, None]  # W 1 T T
            bias = torch.where(mask, torch.zeros(()) if bias is None else bias, float("-inf"))
        return attend(windows, qkv, self.num_heads, bias, self.qkv.bias)

    def windows(self, x: Tensor) -> Windows:
        """Those of the grid of x, (B, h, w, ...)."""
        return cut_grid((x.shape[1], x.shape[2]), self.window, self.shifted, self.masked)

    def within(self, windows: Windows, x: Tensor) -> Tensor:
        """Attention within given windows of the grid. Shape: x (B, h, w, C) -> the same."""
        q, k, v = windows.split_heads(self.qkv(windows.cut(x)), self.num_heads)
        bias = self.bias(windows.size, q)
        if windows.need_mask:
            bias = self._masked_bias(windows, bias, q)
        out = (attention_as_written if transformed() else F.scaled_dot_product_attention)(q, k, v, bias)
        return self.proj(windows.join(windows.merge_heads(out, x.shape[0], self.num_heads)))

    def bias(self, window: tuple[int, int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor | None:
        """What is added to a window's logits, of this type or that of `like`.

        Shape:
            returns (1, H, T, T)
        """
        table = self.relative_position_bias_table
        if table is None:
            return None
        index = kept(like, relative_position_index, window, self.window)
        return table.to(dtype or like.dtype)[index].permute(2, 0, 1)[None]

    def _masked_bias(self, windows: Windows, bias: Tensor | None, like: Tensor) -> Tensor:
        """Shape: bias (1, H, T, T) -> (1, W H, T, T)."""
        mask = kept(like, attention_mask, windows)[:, None]  # W 1 T T
        if bias is None:
            mask = mask.expand(-1, self.num_heads, -1, -1)
        else:
            mask = torch.where(mask, bias, float("-inf"))
        return mask.flatten(0, 1)[None]


def attention_as_written(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(D) + bias) v: torch's fast kernels know no transforms of torch.func.

    Shape:
        q, k, v: (..., T, D), bias: (..., T, T) -> (..., T, D)
    """
    logits = q @ k.mT * q.shape[-1] ** -0.5
    return (logits if bias is None else logits + bias).softmax(dim=-1) @ v
