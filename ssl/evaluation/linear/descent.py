"""SGD with momentum for a whole grid of heads, each with its own learning rate.

Shapes used below: B images of this process's share of a step, H heads.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nestling.ssl.distributed import failing_together, is_distributed, summed
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.linear.heads import HeadGrid, HeadSpec
from nestling.ssl.schedules import cosine_at, peak_learning_rate


def peak_rates(specs: Sequence[HeadSpec], batch_size: int) -> list[float]:
    """The learning rates of the heads at the first step: lr * batch_size / 256."""
    return [peak_learning_rate(spec.value, "linear", batch_size) for spec in specs]


class Descent:
    """torch's SGD (v = m v + g, w = w - rate v), step by step, without weight decay.

    With `together` each process hands in its share of a step, of any length or none, and all make the same
    step: that of the mean gradient over the images of all shares.
    """

    def __init__(
        self, grid: HeadGrid, batch_size: int, num_steps: int, momentum: float, together: bool
    ) -> None:
        self.grid, self.num_steps, self.momentum = grid, num_steps, momentum
        self.together = together and is_distributed()
        self.step_number = 0
        rates = torch.tensor(peak_rates(grid.specs, batch_size))
        counts = [len(weight) for weight in grid.weights.values()]
        # Of weight (h, C, D) and bias (h, C), one rate for each head.
        self._rates = [
            part.view(-1, *[1] * (tensor.ndim - 1)).to(tensor.device)
            for part, pair in zip(rates.split(counts), self._pairs(grid.parameters), strict=True)
            for tensor in pair
        ]
        self._velocities = [torch.zeros_like(tensor) for tensor in grid.parameters]

    @staticmethod
    def _pairs(tensors: list[Tensor]) -> list[list[Tensor]]:
        return [tensors[start : start + 2] for start in range(0, len(tensors), 2)]

    def step(self, vectors: Mapping[str, Tensor], labels: Tensor, problem: UserError | None = None) -> None:
        """One step on {readout: (B, D)} and (B,) labels; a step without any image changes nothing.

        Raises, on all processes:
            UserError: one of them has a `problem` instead of images.
        """
        gradients = self._gradients(vectors, labels)
        count, failed = float(len(labels)), float(problem is not None)
        if self.together:
            count, failed = self._exchanged(gradients, count, failed)
        if failed:
            if self.together:
                with failing_together():
                    _raise(problem)
            _raise(problem)
        factor = cosine_at(self.step_number, self.num_steps, 1.0, 0.0)
        self.step_number += 1
        if not count:
            return
        for tensor, gradient, velocity, rate in zip(
            self.grid.parameters, gradients, self._velocities, self._rates, strict=True
        ):
            velocity.mul_(self.momentum).add_(gradient, alpha=1 / count)
            tensor.addcmul_(velocity, rate, value=-factor)

    def _gradients(self, vectors: Mapping[str, Tensor], labels: Tensor) -> list[Tensor]:
        """Of the sum over the images of this process; heads don't meet, so of the sum over heads too."""
        parameters = self.grid.parameters
        if not len(labels):
            return [torch.zeros_like(tensor) for tensor in parameters]
        for tensor in parameters:
            tensor.requires_grad_(True)
        try:
            with torch.enable_grad():
                logits = self.grid.logits(vectors)  # B H C
                wanted = labels.to(logits.device)[:, None].expand(logits.shape[:2])
                loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
            return list(torch.autograd.grad(loss, parameters))
        finally:
            for tensor in parameters:
                tensor.requires_grad_(False)

    def _exchanged(self, gradients: list[Tensor], count: float, failed: float) -> tuple[float, float]:
        """Sums over all processes, with one message: the gradients in place, the images, the problems."""
        facts = gradients[0].new_tensor([count, failed])
        *sums, facts = summed(torch.cat([*(part.flatten() for part in gradients), facts])).split(
            [*(part.numel() for part in gradients), 2]
        )
        for gradient, total in zip(gradients, sums, strict=True):
            gradient.copy_(total.view_as(gradient))
        count, failed = facts.tolist()
        return count, failed


def _raise(problem: UserError | None) -> None:
    if problem is not None:
        raise problem
