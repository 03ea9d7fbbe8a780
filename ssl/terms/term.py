"""What the terms of a loss share: their inputs and their interface.

Shapes used below: B images, V views, D features of the backbone, K prototypes.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass
class Outputs:
    """What a network made of views: one entry per crop size, global views first, each view-major.

    The logits may be `heads.DeferredLogits`, which are computed when first read.

    Shape:
        vectors: per entry (V * B, D), the backbone's
        logits: per entry (V * B, K), where rows v * B to (v + 1) * B are view v
    """

    vectors: list[Tensor]
    logits: Sequence[Tensor]
    batch_size: int

    def views(self) -> list[Tensor]:
        """The logits of each view, (B, K), global views first."""
        return [view for logits in self.logits for view in logits.split(self.batch_size)]


class Term(nn.Module, ABC):
    """One summand of the training loss."""

    @abstractmethod
    def forward(
        self, student: Outputs, teacher: Outputs, teacher_temperature: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of one micro-batch, a mean over its images, and metrics to log."""

    def update(self) -> None:
        """Called once per step, after the optimizer."""

    def discard(self) -> None:
        """Called instead where a step is left out: forget what its forward passes gathered."""
