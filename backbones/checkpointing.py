"""Activation checkpointing: memory for compute, with the same gradients and the same running statistics."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint


def checkpointed(block: nn.Module, *inputs: Any) -> Any:
    """`block(*inputs)`, its activations thrown away and computed once more in the backward pass.

    The second pass draws the random numbers of the first (drop path) and leaves running statistics
    alone, which torch's own checkpoint would move twice.
    """

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _statistics_kept(block)

    return checkpoint(block, *inputs, use_reentrant=False, context_fn=contexts)


@contextmanager
def _statistics_kept(block: nn.Module) -> Iterator[None]:
    norms = [norm for norm in block.modules() if isinstance(norm, _BatchNorm) and norm.track_running_stats]
    for norm in norms:
        norm.track_running_stats = False  # in training: the batch's statistics are used, none are kept
    try:
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True
