"""The other processes of a run, and the device this one computes on.

Without a process group every function here does nothing, so that callers need no special case.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor


def is_distributed() -> bool:
    """Whether there are other processes to exchange with."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_main() -> bool:
    """Whether this is the only process or the first of several."""
    return not is_distributed() or dist.get_rank() == 0


def summed(tensor: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    if is_distributed():
        dist.all_reduce(tensor)
    return tensor


def average(tensors: list[Tensor]) -> None:
    """Replace each by its mean over all processes, with one message."""
    if not tensors or not is_distributed():
        return
    flat = summed(torch.cat([tensor.flatten() for tensor in tensors])) / dist.get_world_size()
    for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(mean.view_as(tensor))


def computes_on_cpu() -> bool:
    """Whether this process leaves accelerators alone: there is none, or the launcher said so.

    accelerate's launchers hand their choice on by this variable.
    """
    return os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes") or not (
        torch.accelerator.is_available()
    )
