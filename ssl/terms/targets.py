"""The teacher's targets, block by block, and what the term reports of them.

Shapes used below: T global views, n images of a block, K prototypes.
"""

import torch
from torch import Tensor

from nestling.ssl.terms import compiled
from nestling.ssl.terms.pairs import Scratch, in_kind_of, log_sum_exp

PART = 256  # of a row, in which its largest entry is looked for


class Targets:
    """q = softmax((t - center) / temperature) of the teacher's logits t, which also get gathered.

    `gain`, (K,), is a factor of each logit that the last layer left to be applied here.
    """

    def __init__(
        self, center: Tensor, temperature: float, scratch: Scratch, gain: Tensor | None = None
    ) -> None:
        self._scratch = scratch
        self.gain = center.new_ones(1) if gain is None else gain
        self._bias, self._slope = center / -temperature, self.gain / temperature
        self._entropy = center.new_zeros(())  # summed over rows
        self._total = torch.zeros_like(center)
        self._winners: list[Tensor] = []

    def __call__(self, logits: Tensor) -> Tensor:
        """The targets of a block of images. Shape: (T, n, K) -> (T, n, K)."""
        like = torch.empty(
            0, dtype=torch.promote_types(logits.dtype, self._total.dtype), device=logits.device
        )
        y = self._scratch("teacher's scores", logits.shape, like)
        if compiled.takes_rows(logits) and compiled.takes(y, self._bias, self._slope):
            self._gather(logits, y, *compiled.make_targets(logits, self._bias, self._slope, y))
            return y
        torch.addcmul(self._bias, in_kind_of(y, logits), self._slope, out=y)
        q = torch.softmax(y, dim=-1, out=self._scratch("targets", y.shape, y))
        entropy = log_sum_exp(y, q).sum() - torch.dot(q.flatten(), y.flatten())
        self._gather(logits, y, entropy, winners(q).flatten())
        return q

    def _gather(self, logits: Tensor, like: Tensor, entropy: Tensor | float, chosen: Tensor) -> None:
        self._entropy += entropy
        self._winners.append(chosen)
        if compiled.takes_rows(logits) and compiled.takes(self._total):
            compiled.add_rows(self._total, logits)
        else:
            memory = self._scratch("sum", logits.shape[2:], like)
            self._total += torch.sum(logits, dim=(0, 1), dtype=like.dtype, out=memory)

    @property
    def num_rows(self) -> int:
        """How many rows there were."""
        return sum(map(len, self._winners))

    @property
    def total(self) -> Tensor:
        """The sum of all logits, (K,)."""
        return self._total * self.gain

    @property
    def entropy(self) -> Tensor:
        """The mean of all rows."""
        return self._entropy / self.num_rows

    @property
    def dominance(self) -> Tensor:
        """The share of rows whose largest target is at the same prototype."""
        chosen = torch.cat(self._winners)
        votes = torch.zeros_like(self._total).index_add_(0, chosen, self._total.new_ones(len(chosen)))
        return votes.max() / self.num_rows


def winners(p: Tensor) -> Tensor:
    """argmax over the last dimension, in two steps that take a third of the time."""
    if p.shape[-1] % PART:
        return p.argmax(dim=-1)
    parts = p.unflatten(-1, (-1, PART))
    part = parts.amax(dim=-1).argmax(dim=-1, keepdim=True)
    inside = parts.gather(-2, part[..., None].expand(*part.shape, PART)).squeeze(-2).argmax(dim=-1)
    return PART * part.squeeze(-1) + inside
