"""Class-attention layers (CaiT, Touvron et al., 2021): they gather an image's patches in one token.

Shapes used below: B images, N patch tokens, C channels, H heads, D = C / H.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.backbones.layers import LayerNorm, Mlp
from nestling.backbones.linear import Linear


class ClassAttention(nn.Module):
    """The class token looks at itself and at all patches (CaiT, section 2.2): linear in N.

    Only the class token asks, so patches need no query, and with one query no key or value either.

    Shape:
        tokens: (B, 1 + N, C), the class token first -> (B, 1, C)
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = Linear(dim, 3 * dim)  # one matrix, as published; rows: query, key, value
        self.proj = Linear(dim, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.proj(class_token_values(tokens, self.qkv, self.num_heads))

    def attention(self, tokens: Tensor) -> Tensor:
        """The weights that `forward` averages the tokens with.

        Shape:
            tokens: (B, 1 + N, C) -> (B, H, 1 + N)
        """
        return class_token_attention(tokens, self.qkv, self.num_heads)


def class_token_attention(tokens: Tensor, qkv: nn.Linear, num_heads: int) -> Tensor:
    """How much the first token attends to each token, per head, without computing a key.

    q . (W_k x + b_k) = (W_k^T q) . x + q . b_k, and the last is the same for all tokens, which the softmax
    doesn't see: 2 H T C multiply-adds and a few C^2 an image, where keys cost T C^2.

    Shape:
        tokens: (B, T, C) -> (B, H, T)
    """
    weight_q, weight_k, _ = qkv.weight.chunk(3)
    bias_q = None if qkv.bias is None else qkv.bias.chunk(3)[0]
    q = F.linear(tokens[:, 0], weight_q, bias_q).unflatten(-1, (num_heads, -1))  # B H D
    q = q / math.sqrt(q.shape[-1])
    asked = (q.transpose(0, 1) @ weight_k.unflatten(0, (num_heads, -1))).transpose(0, 1)  # B H C
    return (asked @ tokens.mT).softmax(dim=-1)


def class_token_values(tokens: Tensor, qkv: nn.Linear, num_heads: int) -> Tensor:
    """What the first token gathers by attention: the values' mean is the value of the mean token.

    Shape:
        tokens: (B, T, C) -> (B, 1, C)
    """
    attention = class_token_attention(tokens, qkv, num_heads)
    weight_v = qkv.weight.chunk(3)[2].unflatten(0, (num_heads, -1))  # H D C
    gathered = (attention @ tokens).transpose(0, 1) @ weight_v.mT  # H B D
    x = gathered.transpose(0, 1).flatten(1)[:, None]
    return x if qkv.bias is None else x + qkv.bias.chunk(3)[2]


class ClassAttentionBlock(nn.Module):
    """Class attention, then a feed-forward network for the class token alone (section 3.3).

    As published, patches take the way of the class token around both sublayers: they add their own
    normalised values, and are doubled at the end. With `tokens_norm` off the second norm spares them.

    Shape:
        cls: (B, 1, C), patches: (B, N, C) -> the same
    """

    def __init__(
        self, dim: int, num_heads: int, hidden_dim: int, layer_scale: float, tokens_norm: bool
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = LayerNorm(dim), LayerNorm(dim)
        self.attn = ClassAttention(dim, num_heads)
        self.mlp = Mlp(dim, hidden_dim)
        self.gamma1, self.gamma2 = (nn.Parameter(torch.full((dim,), layer_scale)) for _ in "12")
        self.tokens_norm = tokens_norm

    def forward(self, cls: Tensor, patches: Tensor, only_cls: bool = False) -> tuple[Tensor, Tensor]:
        """With `only_cls` nobody reads the patches, which are left as they came."""
        cls_normed, patches_normed = self.norm1(cls), self.norm1(patches)
        update = self.attn(torch.cat([cls_normed, patches_normed], dim=1))
        cls = self.norm2(torch.addcmul(cls, update, self.gamma1))
        cls = torch.addcmul(cls, self.mlp(cls), self.gamma2)
        if only_cls:
            return cls, patches
        patches = torch.addcmul(patches, patches_normed, self.gamma1)
        if self.tokens_norm:
            patches = self.norm2(patches)
        return cls, patches + patches

    def attention(self, cls: Tensor, patches: Tensor) -> Tensor:
        """Shape: cls (B, 1, C), patches (B, N, C) -> (B, H, 1 + N)."""
        return self.attn.attention(self.norm1(torch.cat([cls, patches], dim=1)))
