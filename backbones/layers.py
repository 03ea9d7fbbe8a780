"""Parts that several families share.

Shapes used below: B images, N tokens, C channels.
"""

from functools import partial
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.backbones.gelu import Gelu
from nestling.backbones.linear import Linear
from nestling.backbones.packing import Sizes, rows_of

LayerNorm = partial(nn.LayerNorm, eps=1e-6)


class DropPath(nn.Module):
    """Stochastic depth (Huang et al., 2016): drops a residual branch for whole samples, in training.

    Returns the branch's factor instead of the scaled branch: 0 with probability `rate`, else
    1 / (1 - rate), so that the expectation is 1. Multiplied into the layer scale it costs one value a
    sample and channel instead of a pass over all tokens.

    The share kept is a tensor, no buffer: a compiled block takes it as an input, and so serves the blocks
    of all rates, where a number would be part of its code. `rate` may be set at any time.

    Shape:
        x: (B, ...) -> (B, 1, 1); with `sizes` (R, ...) -> (R, 1), see packing.py
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    @property
    def rate(self) -> float:
        return self._rate

    @rate.setter
    def rate(self, rate: float) -> None:
        self._rate, self.drops = rate, rate > 0
        self.keep = torch.tensor(1.0 - rate, dtype=torch.float64, device="cpu")

    def forward(self, x: Tensor, sizes: Sizes | None = None) -> Tensor:
        if sizes is not None:
            return rows_of(
                [self(x.new_empty(images, 0)).expand(-1, prod(rest), -1) for images, *rest in sizes]
            )
        return (torch.rand(len(x), 1, 1, device=x.device) < self.keep).to(x.dtype) / self.keep

    def extra_repr(self) -> str:
        return f"rate={self.rate}"


class Mlp(nn.Module):
    """Two linear layers with a GELU between.

    Shape:
        x: (B, N, C) -> (B, N, C)
    """

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc1 = Linear(dim, hidden_dim)
        self.act = Gelu()
        self.fc2 = Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class SwiGLU(nn.Module):
    """The gated feed-forward network of DINOv2's giant (Shazeer, 2020): SiLU(a) * b between two layers.

    a and b are the halves of the first layer's output. The width is two thirds of the one of an `Mlp`,
    rounded up to a multiple of 8, so that both cost about the same.

    Shape:
        x: (B, N, C) -> (B, N, C)
    """

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        hidden_dim = (int(hidden_dim * 2 / 3) + 7) // 8 * 8
        self.w12 = Linear(dim, 2 * hidden_dim)
        self.w3 = Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(gate) * value)


class LayerScale(nn.Module):
    """A learned factor per channel of a residual branch (CaiT, section 2.1), returned, not applied.

    So a drop path is multiplied into it first, and one pass over the tokens scales and adds.

    Shape:
        returns (C,)
    """

    def __init__(self, dim: int, value: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), value))

    def forward(self) -> Tensor:
        return self.gamma


def wide(x: Tensor) -> Tensor:
    """In fp32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def init_linear(module: nn.Module) -> None:
    """The published initialisation of transformers: truncated normal weights (0.02), zero biases."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
