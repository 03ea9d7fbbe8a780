"""The core of XCiT's attention: D x D maps between channels (El-Nouby et al., 2021, section 3.2).

Shapes used below: B images, N tokens, H heads, D channels a head, M = B * H maps.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nestling.backbones.dispatch import backward_by_hand
from nestling.backbones.layers import wide

SMALLEST = 1e-12  # of a norm, as in F.normalize


def cross_covariance(qkv: Tensor, temperature: Tensor) -> Tensor:
    """Every head's channels mixed by softmax(t * q k^T), q and k L2-normalised over the tokens.

    They are normalised after the product, D x D numbers instead of D x N; but in fp16, which it could
    overflow, keys before. Training on it has a backward pass of its own.

    Shape:
        qkv: (B, N, 3, H, D), temperature: (H, 1, 1) -> (B, N, H * D)
    """
    trained = torch.is_grad_enabled() and qkv.requires_grad
    if trained and backward_by_hand(qkv) and qkv.dtype != torch.float16:
        return CrossCovariance.apply(qkv, temperature)
    q, k, v = rows(qkv).unbind()  # each B H N D
    norm_q, norm_k = norms(q), norms(k)
    if k.dtype == torch.float16:
        k, norm_k = k / norm_k.to(k.dtype), torch.ones_like(norm_k)
    cosine = q.mT @ k / norm_q.mT / norm_k
    attention = (cosine * temperature).softmax(dim=-1).to(v.dtype)  # B H D D
    return (v @ attention.mT).transpose(1, 2).flatten(2)


def rows(qkv: Tensor) -> Tensor:
    """One copy, of whole rows of D: with the tokens innermost it takes nine times as long.

    Shape:
        qkv: (B, N, 3, H, D) -> (3, B, H, N, D)
    """
    return qkv.permute(2, 0, 3, 1, 4).contiguous()


def norms(x: Tensor) -> Tensor:
    """L2 norms over the tokens, in fp32 at least, kept off zero.

    On CPUs vector_norm over any but the last dimension takes three times as long.

    Shape:
        x: (..., N, D) -> (..., 1, D)
    """
    return wide(x).square().sum(dim=-2, keepdim=True).clamp_min(SMALLEST**2).sqrt()


class CrossCovariance(torch.autograd.Function):
    """The same with its gradient written out: fewer passes over tokens and maps than autograd's.

    With s = q^T k / (|q| |k|) and G the gradient of s, that of q is k (G / (|q| |k|))^T minus
    q * (row sums of G * s) / |q|^2, where the second term is that of the norm; k's alike, with column sums.

    RuntimeError for a second derivative (create_graph=True): take it by torch.func.grad of torch.func.grad,
    under which autograd's own gradient is used.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, temperature: Tensor) -> Tensor:
        """Shape: as `cross_covariance`."""
        batch, _, _, num_heads, _ = qkv.shape
        parts = rows(qkv).flatten(1, 2)  # 3 M N D
        q, k, v = parts.unbind()
        inverse = norms(parts[:2]).reciprocal()  # 2 M 1 D
        cosine = torch.bmm(q.mT, k).to(inverse.dtype)
        cosine.mul_(inverse[0].mT).mul_(inverse[1])  # M D D
        attention = (cosine.unflatten(0, (batch, num_heads)) * temperature).flatten(0, 1).softmax(dim=-1)
        x = torch.bmm(v, attention.to(v.dtype).mT)  # M N D
        ctx.save_for_backward(parts, inverse, cosine, attention, temperature)
        return x.unflatten(0, (batch, num_heads)).transpose(1, 2).flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Shape: gradient (B, N, H * D) -> those of qkv and temperature."""
        parts, inverse, cosine, attention, temperature = ctx.saved_tensors
        batch, num_heads = len(gradient), len(temperature)
        q, k, v = parts.unbind()
        found = torch.empty_like(parts)
        given = gradient.unflatten(-1, (num_heads, -1)).transpose(1, 2).flatten(0, 1).to(v.dtype)  # M N D
        torch.bmm(given, attention.to(v.dtype), out=found[2])

        slope = torch.bmm(given.mT, v).to(attention.dtype)
        slope = torch._softmax_backward_data(slope, attention, -1, attention.dtype)  # of t * s
        along = (slope * cosine).unflatten(0, (batch, num_heads))
        temperatures = temperature.expand(batch, -1, -1, -1).flatten(0, 1)  # M 1 1
        slope.mul_(inverse[0].mT * temperatures).mul_(inverse[1])
        product = slope.to(q.dtype)
        for place, (part, other, map_, dim) in enumerate(((q, k, product.mT, -1), (k, q, product, -2))):
            share = along.sum(dim).flatten(0, 1)[:, None] * temperatures * inverse[place].square()  # M 1 D
            torch.bmm(other, map_, out=found[place]).addcmul_(part, share.to(part.dtype), value=-1)
        found = found.unflatten(1, (batch, num_heads)).permute(1, 3, 0, 2, 4)
        return found, along.sum((0, 2, 3))[:, None, None].to(temperature.dtype)
