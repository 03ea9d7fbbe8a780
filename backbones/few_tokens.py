"""Softmax attention among few tokens on a CPU, with its gradient written out.

torch's fused attention works through blocks of tokens: for the 37 of a 96-pixel view at patch 16 it takes 1.2
to 1.6 times as long as the four plain products of its gradient, and six times in bf16; for the 197 of 224
pixels 1 to 1.2 times, and twice. Beyond LONGEST it keeps much less: plain products keep T^2 H weights.

Shapes used below: B images, T tokens, H heads, D channels a head, M = B * H.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nestling.backbones.dispatch import backward_by_hand
from nestling.backbones.layers import wide

LONGEST = 256  # tokens; with heads of 64 channels the weights kept are then as many as q, k, v and one more
DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def takes(qkv: Tensor) -> bool:
    """Whether `FewTokens` trains on these, (B, T, 3, H, D), in less time than torch's fused attention."""
    trained = torch.is_grad_enabled() and qkv.requires_grad
    if not (trained and backward_by_hand(qkv)):
        return False  # before the number of tokens is asked for, which would bind an exported graph to it
    return qkv.device.type == "cpu" and qkv.dtype in DTYPES and qkv.shape[1] <= LONGEST


class FewTokens(torch.autograd.Function):
    """softmax(q k^T / sqrt(D)) v for every head (Vaswani et al., 2017, eq. 1).

    Of bf16 the scores, the softmax and its gradient are fp32, as in torch's fused attention; the weights are
    rounded for the products that follow.

    RuntimeError for a second derivative (create_graph=True), as of torch's fused attention.

    Shape:
        qkv: (B, T, 3, H, D) -> (B, T, H * D)
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor) -> Tensor:
        batch, _, _, num_heads, _ = qkv.shape
        parts = qkv.permute(2, 0, 3, 1, 4).flatten(1, 2)  # 3 M T D
        q, k, v = parts.unbind()
        attention = scaled_product(q, k).softmax(dim=-1).to(v.dtype)  # M T T
        ctx.save_for_backward(parts, attention)
        ctx.num_heads = num_heads
        return torch.bmm(attention, v).unflatten(0, (batch, num_heads)).transpose(1, 2).flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Shape: gradient (B, T, H * D) -> that of qkv."""
        parts, attention = ctx.saved_tensors
        q, k, v = parts.unbind()
        found = torch.empty_like(parts)
        given = gradient.unflatten(-1, (ctx.num_heads, -1)).transpose(1, 2).flatten(0, 1)  # M T D
        torch.bmm(attention.mT, given, out=found[2])
        slope = scaled_product(given, v)
        slope = torch._softmax_backward_data(slope, attention.to(slope.dtype), -1, slope.dtype)
        slope = slope.to(q.dtype)
        torch.bmm(slope, k, out=found[0])
        torch.bmm(slope.mT, q, out=found[1])
        return found.unflatten(1, (-1, ctx.num_heads)).permute(1, 3, 0, 2, 4)


def scaled_product(a: Tensor, b: Tensor) -> Tensor:
    """a b^T / sqrt(D), in fp32 at least. Shape: (M, T, D), (M, T, D) -> (M, T, T)."""
    a, b = wide(a), wide(b)
    with torch.autocast("cpu", enabled=False):  # which would round them again
        return torch.baddbmm(a.new_empty(()), a, b.mT, beta=0, alpha=1 / math.sqrt(a.shape[-1]))
