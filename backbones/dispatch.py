"""Which of two ways to compute the same may be taken: of graphs and transforms, plain operations only."""

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode


def on_cpu(x: Tensor) -> bool:
    """Whether to choose what is fast on CPUs: not for a graph on its way to other devices."""
    return x.device.type == "cpu" and not torch.compiler.is_exporting()


def transformed() -> bool:
    """Whether a transform of torch.func (grad, jvp, vmap) is active: tensors look plain but are its own."""
    if torch.compiler.is_compiling():
        return False
    peek = getattr(torch._C._functorch, "peek_interpreter_stack", None)
    return peek is not None and peek() is not None


def holds_numbers(x: Tensor) -> bool:
    """Whether x is a tensor of numbers: not of a graph being traced, fake, meta, or of a transform."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or transformed():
        return False
    return type(x) is Tensor and not x.is_meta


def backward_by_hand(x: Tensor) -> bool:
    """Whether x may go through an autograd.Function of ours, whose gradient is written out.

    Such a function can't be saved in a traced graph, and knows neither forward-mode derivatives nor the
    transforms of torch.func. There plain operations compute the same.
    """
    return holds_numbers(x) and getattr(forward_ad, "_current_level", -1) < 0


def calls_kernels(x: Tensor) -> bool:
    """Whether x may go to a function of ours that torch doesn't know, or to another library than it takes.

    Not under a dispatch mode, such as that of a FLOP counter, which looks for torch's own operations.
    """
    return backward_by_hand(x) and _get_current_dispatch_mode() is None and x.device.type == "cpu"
