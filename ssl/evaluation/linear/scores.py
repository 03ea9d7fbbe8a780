"""Accuracies of many heads, counted batch by batch over all processes.

Shapes used below: B images, H heads, C classes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nestling.ssl.distributed import summed

TOP = 5


class Scores(NamedTuple):
    """Shares of images whose class is the first, or among the first five, of a head.

    Shape:
        top1, top5: (H,) float64; finite: (H,) bool, whether a head said nothing but numbers
    """

    top1: Tensor
    top5: Tensor
    finite: Tensor
    num_images: int


class Counter:
    """Adds up what heads get right, all of them at once; torchmetrics would take one after the other.

    Among equal logits the smallest class comes first. An image of which a head says NaN or infinity is wrong.
    """

    def __init__(self, num_heads: int, device: torch.device | str) -> None:
        self._counts = torch.zeros(3, num_heads, dtype=torch.long, device=device)  # first, five, not finite
        self._images = torch.zeros(1, dtype=torch.long, device=device)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Shape: logits (B, H, C), labels (B,)."""
        wanted = labels.to(logits.device)[:, None, None].expand(-1, logits.shape[1], 1)  # B H 1
        right = logits.gather(2, wanted)
        classes = torch.arange(logits.shape[2], device=logits.device)
        before = (logits > right) | ((logits == right) & (classes < wanted))
        rank = before.sum(dim=2)  # B H
        broken = ~logits.isfinite().all(dim=2)
        rank = rank.masked_fill(broken, max(TOP, logits.shape[2]))
        self._counts += torch.stack([(rank < 1).sum(0), (rank < TOP).sum(0), broken.sum(0)])
        self._images += len(labels)

    def scores(self, together: bool) -> Scores:
        """What was counted; with `together` by all processes, which must all ask."""
        if together:
            summed(self._counts)
            summed(self._images)
        first, five, broken = self._counts.cpu()
        count = int(self._images)
        return Scores(first.double() / count, five.double() / count, broken == 0, count)
