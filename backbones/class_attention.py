"""Class-attention layers (CaiT, Touvron et al., 2021): they gather an image's patches in one token.

Shapes used below: B images, N patch tokens, C channels, H heads, D = C / H.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.backbones.layers import LayerNorm, Mlp


class ClassAttention(nn.Module):
    """The class token looks at itself and at all patches (CaiT, section 2.2): linear in N.

    Only the class token asks, so no query is computed for the patches.

    Shape:
        tokens: (B, 1 + N, C), the class token first -> (B, 1, C)
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)  # one matrix, as published; rows: query, key, value
        self.proj = nn.Linear(dim, dim)

    def query_key_value(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Shape: returns (B, H, 1, D), (B, H, 1 + N, D), (B, H, 1 + N, D)."""
        dim = tokens.shape[-1]
        weight_q, weight_kv = self.qkv.weight.split((dim, 2 * dim))
        bias_q, bias_kv = self.qkv.bias.split((dim, 2 * dim))
        q = F.linear(tokens[:, :1], weight_q, bias_q).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        kv = F.linear(tokens, weight_kv, bias_kv).unflatten(-1, (2, self.num_heads, -1))
        k, v = kv.permute(2, 0, 3, 1, 4).unbind()
        return q, k, v

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.scaled_dot_product_attention(*self.query_key_value(tokens))  # B H 1 D
        return self.proj(x.transpose(1, 2).flatten(2))

    def attention(self, tokens: Tensor) -> Tensor:
        """The weights that `forward` averages the values with.

        Shape:
            tokens: (B, 1 + N, C) -> (B, H, 1 + N)
        """
        q, k, _ = self.query_key_value(tokens)
        return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(dim=-1).squeeze(2)


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

    def forward(self, cls: Tensor, patches: Tensor) -> tuple[Tensor, Tensor]:
        cls_normed, patches_normed = self.norm1(cls), self.norm1(patches)
        update = self.attn(torch.cat([cls_normed, patches_normed], dim=1))
        cls = self.norm2(torch.addcmul(cls, update, self.gamma1))
        cls = torch.addcmul(cls, self.mlp(cls), self.gamma2)
        patches = torch.addcmul(patches, patches_normed, self.gamma1)
        if self.tokens_norm:
            patches = self.norm2(patches)
        return cls, patches + patches

    def attention(self, cls: Tensor, patches: Tensor) -> Tensor:
        """Shape: cls (B, 1, C), patches (B, N, C) -> (B, H, 1 + N)."""
        return self.attn.attention(self.norm1(torch.cat([cls, patches], dim=1)))
