"""Centering: what keeps one prototype from winning everywhere (DINO, section 3.1)."""

import torch
from torch import Tensor, nn

from nestling.ssl.distributed import summed


class Center(nn.Module):
    """Running mean of teacher logits, c <- m c + (1 - m) mean(logits), once per step.

    `add` only gathers; `update` folds in what the micro-batches of a step gathered, over all
    processes, so that accumulating 4 x 2 images moves the center as one batch of 8 does.
    lightly's center moves at every forward, so at every micro-batch. Always fp32: a fp16 sum of
    1024 logits overflows, and bf16 swallows the update.
    """

    center: Tensor
    total: Tensor
    count: Tensor

    def __init__(self, num_prototypes: int, momentum: float = 0.9) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("center", torch.zeros(num_prototypes))
        self.register_buffer("total", torch.zeros(num_prototypes), persistent=False)
        self.register_buffer("count", torch.zeros(()), persistent=False)

    @torch.no_grad()
    def add(self, logits: Tensor) -> None:
        """Gather the teacher's logits (B, K) of one micro-batch."""
        self.add_sum(logits.sum(dim=0, dtype=self.total.dtype), len(logits))

    @torch.no_grad()
    def add_sum(self, total: Tensor, count: int) -> None:
        """Gather the sum (K,) of that many rows of logits."""
        self.total += total
        self.count += count

    @torch.no_grad()
    def update(self) -> None:
        """Fold in all that was gathered since the last step, by all processes."""
        gathered = summed(torch.cat([self.total, self.count[None]]))
        self.center.lerp_(gathered[:-1] / gathered[-1], 1 - self.momentum)
        self.discard()

    def discard(self) -> None:
        """Forget what was gathered since the last step."""
        self.total.zero_()
        self.count.zero_()
