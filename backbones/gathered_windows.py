"""Attention within windows on a CPU: every token's heads go to their window in one copy, and back in one.

Padding, shift, cut and the split into heads are one gathering of rows of D numbers, and so are their
gradients. It comes after the projection to queries, keys and values, so padding costs no matrix product.

Shapes used below: as in `windows`; N = h w tokens, P parts (query, key, value), G = B W H windows of a head.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.amp import custom_bwd, custom_fwd
from torch.autograd.function import once_differentiable

from nestling.backbones.dispatch import backward_by_hand
from nestling.backbones.layers import wide
from nestling.backbones.windows import Windows, kept, token_places


def can_gather(x: Tensor) -> bool:
    """Whether attention is computed here: on a CPU, where a gradient by hand will do."""
    return backward_by_hand(x) and x.device.type == "cpu" and x.dtype != torch.float16


def attend(
    windows: Windows, qkv: Tensor, num_heads: int, bias: Tensor | None, padding: Tensor | None
) -> Tensor:
    """softmax(q k^T / sqrt(D) + bias) v within windows; attended padding holds `padding`, None for zeros.

    Shape:
        qkv: (B, h, w, 3 C), bias: (1 or W, 1 or H, T, T), padding: (3 C) -> (B, h, w, C)
    """
    tokens = qkv.flatten(1, 2)
    if windows.is_padded and not windows.masked:
        added = tokens.new_zeros(tokens.shape[-1]) if padding is None else padding
        tokens = torch.cat([tokens, added.expand(len(tokens), 1, -1)], dim=1)
    with torch.autocast("cpu", enabled=False):
        attended: Tensor = _Attention.apply(tokens, bias, windows, num_heads)
    return attended.unflatten(1, qkv.shape[1:3])


class _Attention(torch.autograd.Function):
    """The equation and its derivative: of what lies between, only q, k, v and the weights are kept.

    Of bf16 the scores, the softmax and its gradient are fp32; the weights are rounded for the products that
    follow.

    RuntimeError for a second derivative (create_graph=True): take it by torch.func.grad of torch.func.grad,
    under which autograd's own gradient is used.
    """

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, tokens: Tensor, bias: Tensor | None, windows: Windows, num_heads: int) -> Tensor:
        """Shape: tokens (B, N, 3 C), or (B, N + 1, 3 C) with attended padding -> (B, N, C)."""
        ctx.windows, ctx.heads = windows, (len(tokens), windows.number, num_heads)
        ctx.bias_shape = None if bias is None else bias.shape
        parts = _gathered(windows, tokens, 3, num_heads)  # 3 G T D
        weights = torch.bmm(wide(parts[0]), wide(parts[1]).mT)  # G T T
        ctx.scale = parts.shape[-1] ** -0.5
        if bias is None:
            weights.mul_(ctx.scale)
        else:
            logits = weights.unflatten(0, ctx.heads)
            torch.add(bias, logits, alpha=ctx.scale, out=logits)
        weights = torch.softmax(weights, -1, out=weights).to(parts.dtype)
        ctx.save_for_backward(parts, weights)
        return _returned(windows, torch.bmm(weights, parts[2])[None], ctx.heads)

    @staticmethod
    @custom_bwd(device_type="cpu")
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        """Shape: grad (B, N, C) -> those of tokens and bias."""
        parts, weights = ctx.saved_tensors
        q, k, v = parts
        if ctx.windows.is_padded:
            grad = F.pad(grad, (0, 0, 0, 1))  # what padded tokens received was dropped
        (grad,) = _gathered(ctx.windows, grad, 1, ctx.heads[-1])  # G T D
        change = torch.empty_like(parts)
        torch.bmm(weights.mT, grad, out=change[2])
        logits = torch.bmm(wide(grad), wide(v).mT)
        logits = torch._softmax_backward_data(logits, wide(weights), -1, logits.dtype)
        bias = logits.unflatten(0, ctx.heads).sum_to_size(ctx.bias_shape) if ctx.needs_input_grad[1] else None
        logits = logits.to(k.dtype)
        change[0].baddbmm_(logits, k, beta=0, alpha=ctx.scale)
        change[1].baddbmm_(logits.mT, q, beta=0, alpha=ctx.scale)
        tokens = _returned(ctx.windows, change, ctx.heads)
        if ctx.windows.is_padded and not ctx.windows.masked:
            padded = kept(grad, _padded, ctx.windows)[:, None, :, None]  # W 1 T 1
            added = (change.unflatten(1, ctx.heads) * padded).sum((2, 4))  # 3 B H D
            tokens = torch.cat([tokens, added.transpose(0, 1).flatten(1)[:, None]], dim=1)
        return tokens, bias, None, None


def _gathered(windows: Windows, tokens: Tensor, parts: int, num_heads: int) -> Tensor:
    """Every part and head of a token in its window; a token beyond the grid's is that of the padding.

    Without one, padding holds the first token's numbers.

    Shape:
        tokens: (B, N or N + 1, P C) -> (P, G, T, D)
    """
    batch, number = tokens.shape[:2]
    width = tokens.shape[-1] // (parts * num_heads)  # as a number: of no images a reshape can't find it
    rows = tokens.reshape(batch * number * parts * num_heads, width)
    token = kept(tokens, _tokens, windows, number)[:, None]  # W 1 T
    image, part, head = (torch.arange(count) for count in (batch, parts, num_heads))
    index = (token * parts + part[:, None, None, None, None]) * num_heads + head[:, None]
    index = index + image[:, None, None, None] * (number * parts * num_heads)  # P B W H T
    return rows.index_select(0, index.flatten()).view(parts, -1, token.shape[-1], width)


def _returned(windows: Windows, rows: Tensor, heads: tuple[int, int, int]) -> Tensor:
    """Undo `_gathered`, without padding. Shape: rows (P, G, T, D), heads B, W, H -> (B, N, P C)."""
    (parts, _, length, width), (batch, _, num_heads) = rows.shape, heads
    place = kept(rows, _places, windows)
    image, part, head = (torch.arange(count) for count in (batch, parts, num_heads))
    window = (part[:, None] * batch + image[:, None, None, None]) * windows.number
    window = window + (place // length)[:, None, None]
    index = (window * num_heads + head) * length + (place % length)[:, None, None]  # B N P H
    returned = rows.reshape(-1, width).index_select(0, index.flatten())
    return returned.view(batch, len(place), parts * num_heads * width)


def _tokens(windows: Windows, number: int, device: torch.device) -> Tensor:
    """Each window's tokens, N for padding, or 0 where there are but N. Shape: (W, T)."""
    (row, column), length = token_places(windows, device), windows.rows.length * windows.columns.length
    outside = _padded(windows, device)
    return torch.where(outside, 0 if number == length else length, row * windows.columns.length + column)


def _places(windows: Windows, device: torch.device) -> Tensor:
    """Where each token of the grid is among the windows' T tokens, end to end. Shape: (N,)."""
    inside = (~_padded(windows, device)).flatten().nonzero()[:, 0]
    token = _tokens(windows, windows.rows.length * windows.columns.length, device).flatten()[inside]
    return inside[token.argsort()]


def _padded(windows: Windows, device: torch.device) -> Tensor:
    """Which of the windows' tokens are padding. Shape: (W, T), bool."""
    row, column = token_places(windows, device)
    return (row >= windows.rows.length) | (column >= windows.columns.length)
