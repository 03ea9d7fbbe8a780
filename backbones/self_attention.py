"""Self-attention layers of a plain transformer (Dosovitskiy et al., 2021): every token looks at every token.

Shapes used below: B images, T tokens, the class token first, C channels, H heads, D = C / H.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.backbones import few_tokens
from nestling.backbones.class_attention import class_token_values
from nestling.backbones.layers import DropPath, LayerNorm, LayerScale, Mlp, SwiGLU
from nestling.backbones.linear import Linear
from nestling.backbones.packing import Sizes, by_size
from nestling.backbones.rope import rotate

Rope = Tensor | Sequence[Tensor | None] | None  # of one crop size or of each


class Attention(nn.Module):
    """Multi-head self-attention, fused: softmax(q k^T / sqrt(D)) v costs 4 T C^2 + 2 T^2 C multiply-adds.

    Shape:
        x: (B, T, C), rope: (2, T, D / 2) -> (B, T, C)
        with `sizes` x: (R, C), a rope or None for each -> (R, C)
    """

    def __init__(self, dim: int, num_heads: int, qkv_bias: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = Linear(dim, dim)

    def projected(self, x: Tensor) -> Tensor:
        """Queries, keys and values. Shape: (..., C) -> (..., 3, H, D)."""
        return self.qkv(x).unflatten(-1, (3, self.num_heads, -1))

    def forward(self, x: Tensor, rope: Rope = None, sizes: Sizes | None = None) -> Tensor:
        return self.proj(by_size(attended, self.projected(x), sizes, rope))

    def of_class_token(self, x: Tensor, rope: Tensor | None = None) -> Tensor:
        """Shape: x (B, T, C), rope (2, T, D / 2) -> (B, 1, C)."""
        if rope is None:
            return self.proj(class_token_values(x, self.qkv, self.num_heads))
        q, k, v = by_head(self.projected(x), rope)  # a rotary position turns every key, so keys are needed
        return self.proj(mixed(q[:, :, :1], k, v))

    def class_attention(self, x: Tensor, rope: Tensor | None = None) -> Tensor:
        """The weights that `forward` averages the values with for the class token, computed explicitly.

        Shape:
            x: (B, T, C), rope: (2, T, D / 2) -> (B, H, T)
        """
        q, k, _ = by_head(self.projected(x), rope)
        return (q[:, :, :1] @ k.mT / math.sqrt(q.shape[-1])).softmax(dim=-1).squeeze(2)


def attended(qkv: Tensor, rope: Tensor | None) -> Tensor:
    """What every token gathers. Shape: qkv (B, T, 3, H, D), rope (2, T, D / 2) -> (B, T, C)."""
    if rope is None and few_tokens.takes(qkv):
        return few_tokens.FewTokens.apply(qkv)
    return mixed(*by_head(qkv, rope))


def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Shape: q (B, H, S, D), k and v (B, H, T, D) -> (B, S, C)."""
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def by_head(qkv: Tensor, rope: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Shape: qkv (B, T, 3, H, D), rope (2, T, D / 2) -> three of (B, H, T, D)."""
    qkv = qkv.permute(2, 0, 3, 1, 4)
    if rope is None:
        q, k, v = qkv.unbind()  # whose gradients become one tensor in one copy
        return q, k, v
    q, k = rotate(qkv[:2], rope).unbind()
    return q, k, qkv[2]


class Block(nn.Module):
    """Attention, then a feed-forward network, each a pre-norm residual branch (section 3.1, eq. 2 and 3).

    Shape:
        x: (B, T, C), rope: (2, T, D / 2) -> (B, T, C)
        with `sizes` x: (R, C), a rope or None for each -> (R, C)
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        hidden_dim: int,
        qkv_bias: bool,
        ffn: str,
        layer_scale: float,
        drop_path: float,
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = LayerNorm(dim), LayerNorm(dim)
        self.attn = Attention(dim, num_heads, qkv_bias)
        self.mlp = {"mlp": Mlp, "swiglu": SwiGLU}[ffn](dim, hidden_dim)
        self.ls1, self.ls2 = (LayerScale(dim, layer_scale) if layer_scale else None for _ in "12")
        self.drop_path = DropPath(drop_path)

    def forward(
        self, x: Tensor, rope: Rope = None, only_cls: bool = False, sizes: Sizes | None = None
    ) -> Tensor:
        """Of the class token alone, (B, 1, C), with `only_cls`: the last block where nobody reads patches."""
        if only_cls:
            assert rope is None or isinstance(rope, Tensor)
            update = self.attn.of_class_token(self.norm1(x), rope)
            x = self._add(x[:, :1], update, self.ls1)
        else:
            x = self._add(x, self.attn(self.norm1(x), rope, sizes), self.ls1, sizes)
        return self._add(x, self.mlp(self.norm2(x)), self.ls2, sizes)

    def class_attention(self, x: Tensor, rope: Tensor | None = None) -> Tensor:
        """Shape: x (B, T, C), rope (2, T, D / 2) -> (B, H, T)."""
        return self.attn.class_attention(self.norm1(x), rope)

    def _add(
        self, x: Tensor, branch: Tensor, layer_scale: LayerScale | None, sizes: Sizes | None = None
    ) -> Tensor:
        factor = None if layer_scale is None else layer_scale()
        if self.training and self.drop_path.drops:
            drop = self.drop_path(branch, sizes)  # B 1 1 or R 1
            factor = drop if factor is None else factor * drop
        return x + branch if factor is None else torch.addcmul(x, branch, factor)
