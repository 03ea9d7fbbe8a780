"""Mean intersection over union: one confusion matrix over the whole set, never a mean over images.

Shapes used below: K classes.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchmetrics.classification import MulticlassConfusionMatrix

from nestling.ssl.evaluation.dense.masks import IGNORED


class ClassScore(NamedTuple):
    """What one class reached; None where neither the masks nor the predictions hold it."""

    name: str
    pixels: int
    iou: float | None
    accuracy: float | None


class Confusion:
    """How many pixels of which class were taken for which, over all images so far."""

    def __init__(self, num_classes: int) -> None:
        # Ids are checked where masks are read; torchmetrics would look through every mask again.
        self._matrix = MulticlassConfusionMatrix(num_classes, ignore_index=IGNORED, validate_args=False)

    def add(self, predicted: np.ndarray, mask: np.ndarray) -> None:
        """Shape: (H, W) int64, (H, W) uint8."""
        self._matrix.update(torch.from_numpy(predicted), torch.from_numpy(mask.astype(np.int64)))

    @property
    def counts(self) -> Tensor:
        """Shape: (K, K) int64, true classes down, predicted ones across."""
        return self._matrix.confmat.long()

    def classes(self, names: list[str]) -> list[ClassScore]:
        """The intersection over union and the accuracy of each class."""
        hits, truth, said = self.counts.diagonal(), self.counts.sum(1), self.counts.sum(0)
        return [
            ClassScore(name, true, _share(hit, true + given - hit), _share(hit, true))
            for name, hit, true, given in zip(
                names, hits.tolist(), truth.tolist(), said.tolist(), strict=True
            )
        ]

    def results(self) -> dict[str, float]:
        """mIoU over the classes that occur, mean class accuracy, and the share of right pixels."""
        scores = self.classes([""] * len(self.counts))
        ious = [score.iou for score in scores if score.iou is not None]
        accuracies = [score.accuracy for score in scores if score.accuracy is not None]
        return {
            "miou": math.fsum(ious) / max(1, len(ious)),
            "mean_accuracy": math.fsum(accuracies) / max(1, len(accuracies)),
            "pixel_accuracy": float(self.counts.diagonal().sum() / self.counts.sum().clamp(min=1)),
        }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
