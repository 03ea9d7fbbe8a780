"""Self-attention layers of a plain transformer (Dosovitskiy et al., 2021): every token looks at every token.

Shapes used below: B images, T tokens, the class token first, C channels, H heads, D = C / H.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.backbones import few_tokens
from nestling.backbones.class_attention import class_token_values
from nestling.backbones.layers import DropPath, LayerNorm, LayerScale, Mlp, SwiGLU
from nestling.backbones.linear import Linear
from nestling.backbones.rope import rotate


class Attention(nn.Module):
    """Multi-head self-attention, fused: softmax(q k^T / sqrt(D)) v costs 4 T C^2 + 2 T^2 C multiply-adds.

    Shape:
        x: (B, T, C), rope: (2, T, D / 2) -> (B, T, C)
    """

    def __init__(self, dim: int, num_heads: int, qkv_bias: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = Linear(dim, dim)

    def projected(self, x: Tensor) -> Tensor:
        """Queries, keys and values. Shape: (B, T, C) -> (B, T, 3, H, D)."""
        return self.qkv(x).unflatten(-1, (3, self.num_heads, -1))

    def forward(self, x: Tensor, rope: Tensor | None = None, only_cls: bool = False) -> Tensor:
        """Of the class token alone, (B, 1, C), with `only_cls`."""
        if only_cls and rope is None:  # a rotary position turns every key, so there keys are needed
            return self.proj(class_token_values(x, self.qkv, self.num_heads))
        qkv = self.projected(x)
        if rope is None and few_tokens.takes(qkv):
            return self.proj(few_tokens.FewTokens.apply(qkv))
        q, k, v = by_head(qkv, rope)
        x = F.scaled_dot_product_attention(q[:, :, :1] if only_cls else q, k, v)
        return self.proj(x.transpose(1, 2).flatten(2))

    def class_attention(self, x: Tensor, rope: Tensor | None = None) -> Tensor:
        """The weights that `forward` averages the values with for the class token, computed explicitly.

        Shape:
            x: (B, T, C), rope: (2, T, D / 2) -> (B, H, T)
        """
        q, k, _ = by_head(self.projected(x), rope)
        return (q[:, :, :1] @ k.mT / math.sqrt(q.shape[-1])).softmax(dim=-1).squeeze(2)


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

    def forward(self, x: Tensor, rope: Tensor | None = None, only_cls: bool = False) -> Tensor:
        """Of the class token alone, (B, 1, C), with `only_cls`: the last block where nobody reads patches."""
        update = self.attn(self.norm1(x), rope, only_cls=only_cls)
        x = self._add(x[:, :1] if only_cls else x, update, self.ls1)
        return self._add(x, self.mlp(self.norm2(x)), self.ls2)

    def class_attention(self, x: Tensor, rope: Tensor | None = None) -> Tensor:
        """Shape: x (B, T, C), rope (2, T, D / 2) -> (B, H, T)."""
        return self.attn.class_attention(self.norm1(x), rope)

    def _add(self, x: Tensor, branch: Tensor, layer_scale: LayerScale | None) -> Tensor:
        factor = None if layer_scale is None else layer_scale()
        if self.training and self.drop_path.drops:
            drop = self.drop_path(branch)  # B 1 1
            factor = drop if factor is None else factor * drop
        return x + branch if factor is None else torch.addcmul(x, branch, factor)
