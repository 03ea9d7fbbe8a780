"""The DINO term: every student view predicts what the teacher says of every other global view.

Shapes used below: B images, V student views of which the first T are global, K prototypes.
"""

import math
from functools import reduce

import torch
from torch import Tensor

from nestling.ssl.terms.centering import Center
from nestling.ssl.terms.term import Outputs, Term


def dino_loss(student: list[Tensor], targets: Tensor, temperature: float) -> Tensor:
    """Mean over pairs (t, v), t != v, of the cross-entropy -sum_k q_t log p_v (equation 3).

    With the targets q summing to one, the pairs of student view v cost together

        |T_v| logsumexp(s_v / temperature) - <sum of q_t over t in T_v, s_v / temperature>

    where T_v are the global views other than v: one log-sum-exp and one product per view
    instead of one per pair, and no log-softmax is ever stored.

    Shape:
        student: V tensors (B, K), global views first
        targets: (T, B, K), each row a distribution
    """
    everything = targets.sum(dim=0)
    loss = torch.zeros((), dtype=targets.dtype, device=targets.device)
    num_pairs = 0
    for v, logits in enumerate(student):
        others = [q for t, q in enumerate(targets) if t != v]
        if not others:
            continue
        seen = everything if len(others) == len(targets) else reduce(torch.add, others)
        scaled = logits.to(targets.dtype) / temperature
        loss = loss + (len(others) * scaled.logsumexp(dim=-1) - (seen * scaled).sum(dim=-1)).mean()
        num_pairs += len(others)
    return loss / num_pairs


class DinoTerm(Term):
    """Centered, sharpened targets and the multi-crop cross-entropy (Caron et al., 2021).

    Targets, center and softmax are fp32 (fp64 for fp64 logits) whatever the autocast dtype.
    """

    def __init__(self, num_prototypes: int, temperature: float = 0.1, center_momentum: float = 0.9) -> None:
        super().__init__()
        self.temperature = temperature
        self.center = Center(num_prototypes, center_momentum)

    def forward(
        self, student: Outputs, teacher: Outputs, teacher_temperature: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch, whose teacher logits are gathered for the center."""
        with torch.autocast(student.logits[0].device.type, enabled=False):
            logits = teacher.logits[0].to(torch.promote_types(teacher.logits[0].dtype, torch.float32))
            targets = ((logits - self.center.center) / teacher_temperature).softmax(dim=-1)
            self.center.add(logits)
            loss = dino_loss(
                student.views(), targets.unflatten(0, (-1, student.batch_size)), self.temperature
            )
            return loss, self._metrics(targets, loss)

    @torch.no_grad()
    def _metrics(self, targets: Tensor, loss: Tensor) -> dict[str, Tensor]:
        """KL(teacher || student) is the loss less the teacher's entropy, as every pair's q weighs alike."""
        entropy = torch.special.entr(targets).sum(dim=-1).mean()
        winners = targets.argmax(dim=-1)
        votes = torch.zeros_like(targets[0]).index_add_(0, winners, torch.ones_like(targets[:, 0]))
        return {
            "teacher_entropy": entropy / math.log(targets.shape[-1]),
            "kl": loss.detach() - entropy,
            "dominant_prototype": votes.max() / len(targets),
            "center_norm": self.center.center.norm(),
        }

    def update(self) -> None:
        self.center.update()

    def discard(self) -> None:
        self.center.discard()
