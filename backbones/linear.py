"""Linear layers whose products go to the faster of the two libraries that torch has for them on CPUs.

torch gives those of fp32 to MKL, which leaves a tenth to a third of AMD's processors unused; oneDNN, which it
takes for bf16 and for convolutions, doesn't. `_linear_pointwise` hands it a product, as compiled graphs do.
"""

import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nestling.backbones.dispatch import calls_kernels

WORTH_IT = 2**24  # multiply-adds; in fewer the weight, which oneDNN lays out anew, takes longer than is won


class Linear(nn.Linear):
    """`nn.Linear`, to the same within rounding.

    RuntimeError for a second derivative (create_graph=True) where oneDNN multiplies.

    Shape:
        x: (..., C) -> (..., D)
    """

    def forward(self, x: Tensor) -> Tensor:
        if not by_onednn(x, self.weight):
            return super().forward(x)
        if torch.is_grad_enabled():
            return Product.apply(x, self.weight, self.bias)
        return product(x, self.weight, self.bias)


def by_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether `product` takes these, (..., C) and (D, C), in less time than torch's own."""
    if not calls_kernels(x) or type(weight) not in (Tensor, nn.Parameter):
        return False  # before all else, which a graph that is being traced can't follow
    if torch.is_autocast_enabled("cpu") or not multiplies_faster():
        return False
    has_rows = x.ndim > 1 and x.numel() * len(weight) >= WORTH_IT
    return has_rows and x.dtype == weight.dtype == torch.float32


@cache
def multiplies_faster() -> bool:
    """Whether this is a processor of AMD, and torch has both libraries."""
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return has_both and hasattr(torch.ops.mkldnn, "_linear_pointwise") and "AuthenticAMD" in processor()


def processor(told: Path = Path("/proc/cpuinfo")) -> str:
    """What the system says of the first processor, its vendor among it."""
    return told.read_text().split("\n\n")[0] if told.exists() else platform.processor()


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias by oneDNN, without a gradient. Shape: (..., C), (D, C), (D) -> (..., D)."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class Product(torch.autograd.Function):
    """`product` with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Shape: gradient (..., D) -> those of x, weight and bias."""
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        return (
            product(gradient, weight.mT) if of_x else None,
            gradient_of_weight(rows, x.flatten(0, -2)) if of_weight else None,
            rows.sum(dim=0) if of_bias else None,
        )


def gradient_of_weight(rows: Tensor, x: Tensor) -> Tensor:
    """rows^T x: by oneDNN, which lays both out anew, where it is the faster one, of layers that narrow.

    Shape:
        rows, x: (N, D), (N, C) -> (D, C)
    """
    return product(rows.mT, x.mT) if rows.shape[1] < x.shape[1] else rows.mT @ x
