"""GELU by the compiled kernel (native/) where it trains on a CPU.

torch computes the normal distribution's function for the value and again, with the density, for the
gradient: 0.5 and 1.1 ns a number on one core. Here one pass finds value and slope, and the gradient is one
product: 0.65 and 0.15 ns. The slope is kept instead of x, which is as large.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nestling.backbones.dispatch import calls_kernels, on_cpu
from nestling.backbones.kernels import PARALLEL, check_absent, has_torchs_threads

try:
    import nestling.backbones.kernel as kernel
except ImportError as error:
    check_absent(error, "nestling.backbones.kernel")
    kernel = None  # type: ignore[assignment]
else:
    kernel.use_threads(PARALLEL)

WORTH_IT, WORTH_A_THREAD = 2**12, 2**15  # numbers


class Gelu(nn.GELU):
    """x Phi(x) (Hendrycks and Gimpel, 2016), as `nn.GELU`, to within rounding.

    RuntimeError for a second derivative (create_graph=True) where the kernel is used.

    Shape:
        x: any
    """

    def forward(self, x: Tensor) -> Tensor:
        return Compiled.apply(x) if takes(x) else super().forward(x)


class MapGelu(Gelu):
    """Of maps whose channels lie innermost in memory.

    Seen as tokens they are contiguous, which torch's fast path on CPUs asks for too: 1.6 times as fast.

    Shape:
        x: (B, C, h, w) -> (B, C, h, w)
    """

    def forward(self, x: Tensor) -> Tensor:
        if on_cpu(x):
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return super().forward(x)


def takes(x: Tensor) -> bool:
    """Whether the kernel is there, made for x, and x trains: without slopes torch is as fast."""
    if not (torch.is_grad_enabled() and x.requires_grad and calls_kernels(x)):
        return False
    threaded = has_torchs_threads() or torch.get_num_threads() == 1
    has_kind = x.dtype in (torch.float32, torch.bfloat16) and x.is_contiguous()
    return kernel is not None and threaded and has_kind and x.numel() >= WORTH_IT


class Compiled(torch.autograd.Function):
    """The kernel's, of x that is contiguous, fp32 or bf16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        is_half = x.dtype == torch.bfloat16
        out, slopes = torch.empty_like(x), torch.empty_like(x, dtype=torch.int16 if is_half else None)
        kernel.gelu(out.data_ptr(), x.data_ptr(), slopes.data_ptr(), x.numel(), is_half, threads(x))
        ctx.save_for_backward(slopes)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (slopes,) = ctx.saved_tensors
        if slopes.dtype != torch.int16:
            return gradient * slopes
        gradient, out = gradient.contiguous(), torch.empty_like(slopes, dtype=gradient.dtype)
        given = (out.data_ptr(), gradient.data_ptr(), slopes.data_ptr())
        kernel.gelu_backward(*given, slopes.numel(), threads(slopes))
        return out


def threads(x: Tensor) -> int:
    """Among which to share the work."""
    return max(1, min(torch.get_num_threads(), x.numel() // WORTH_A_THREAD))
