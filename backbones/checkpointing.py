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
        return nullcontext(), statistics_kept(block)

    return checkpoint(block, *inputs, use_reentrant=False, context_fn=contexts)


@contextmanager
def statistics_kept(block: nn.Module) -> Iterator[None]:
    """Running statistics of a block's batch norms move by a share of 0, and no batch is counted.

    Switching them off instead would save other tensors than the first pass did, which checkpoint refuses.
    """
    norms = [norm for norm in block.modules() if isinstance(norm, _BatchNorm) and norm.track_running_stats]
    momenta = [norm.momentum for norm in norms]
    counts = [
        None if norm.num_batches_tracked is None else norm.num_batches_tracked.clone() for norm in norms
    ]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum, count in zip(norms, momenta, counts, strict=True):
            norm.momentum = momentum
            if count is not None and norm.num_batches_tracked is not None:
                norm.num_batches_tracked.copy_(count)
