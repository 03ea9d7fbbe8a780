"""The DINO term: every student view predicts what the teacher says of every other global view.

Shapes used below: B images, V student views of which the first T are global, K prototypes.
"""

import math

import torch
from torch import Tensor

from nestling.ssl.heads import DeferredLogits
from nestling.ssl.terms.centering import Center
from nestling.ssl.terms.fused import fused_loss, gain_of
from nestling.ssl.terms.pairs import Scratch, multi_crop_loss
from nestling.ssl.terms.targets import Targets
from nestling.ssl.terms.term import Outputs, Term


def dino_loss(student: list[Tensor], targets: Tensor, temperature: float) -> Tensor:
    """Mean over pairs (t, v), t != v, of the cross-entropy -sum_k q_t log p_v (equation 3).

    Shape:
        student: V tensors (B, K), global views first
        targets: (T, B, K), each row a distribution
    """
    views = [logits[None] for logits in student]
    return multi_crop_loss(views, lambda images: targets[:, images], len(targets), temperature, Scratch())


class DinoTerm(Term):
    """Centered, sharpened targets and the multi-crop cross-entropy (Caron et al., 2021).

    Targets, center and softmax are fp32 (fp64 for fp64 logits) whatever the autocast dtype.
    """

    def __init__(self, num_prototypes: int, temperature: float = 0.1, center_momentum: float = 0.9) -> None:
        super().__init__()
        self.temperature = temperature
        self.center = Center(num_prototypes, center_momentum)
        self._scratch = Scratch()

    def forward(
        self, student: Outputs, teacher: Outputs, teacher_temperature: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch, whose teacher logits are gathered for the center."""
        center, size = self.center.center, student.batch_size
        with torch.autocast(center.device.type, enabled=False):
            if isinstance(student.logits, DeferredLogits) and isinstance(teacher.logits, DeferredLogits):
                targets = Targets(center, teacher_temperature, self._scratch, gain_of(teacher.logits.layer))
                loss = fused_loss(
                    student.logits, teacher.logits, targets, size, self.temperature, self._scratch
                )
            else:
                targets = Targets(center, teacher_temperature, self._scratch)
                views = [logits.unflatten(0, (-1, size)) for logits in student.logits]
                logits = teacher.logits[0].unflatten(0, (-1, size))
                loss = multi_crop_loss(
                    views,
                    lambda images: targets(logits[:, images]),
                    len(logits),
                    self.temperature,
                    self._scratch,
                )
            self.center.add_sum(targets.total, targets.num_rows)
            return loss, self._metrics(targets, loss)

    @torch.no_grad()
    def _metrics(self, targets: Targets, loss: Tensor) -> dict[str, Tensor]:
        """KL(teacher || student) is the loss less the teacher's entropy, as every pair's q weighs alike."""
        entropy, center = targets.entropy, self.center.center
        return {
            "teacher_entropy": entropy / math.log(len(center)),
            "kl": loss.detach() - entropy,
            "dominant_prototype": targets.dominance,
            "center_norm": center.norm(),
        }

    def update(self) -> None:
        self.center.update()

    def discard(self) -> None:
        self.center.discard()
