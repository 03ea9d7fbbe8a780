"""PCA whitening: directions in which all features vary alike count less (Jegou and Chum, 2012).

Shapes used below: N features of D channels, R directions that are kept.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nestling.ssl.errors import UserError

SMALLEST = 1e-7  # variance over the largest one, below which a direction is rounding


class Whitening(NamedTuple):
    """Shape: mean (D,), directions (D, R), each divided by its standard deviation, float64."""

    mean: Tensor
    directions: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        """Shape: (N, D) -> (N, R) float64."""
        return (features.double() - self.mean) @ self.directions


def learn_whitening(features: Tensor) -> Whitening:
    """The mean and the principal directions of features, scaled to variance 1, in float64.

    Directions without variance, such as those beyond the number of images, are dropped.

    Raises:
        UserError: fewer than two different features.
    """
    rows = features.double()
    mean = rows.mean(0)
    centred = rows - mean
    variances, directions = torch.linalg.eigh(centred.T @ centred / len(rows))
    kept = variances > SMALLEST * variances.max().clamp(min=torch.finfo(torch.float32).tiny)
    if not bool(kept.any()):
        raise UserError(f"whitening: {len(rows)} images whose features don't differ can't be learned from")
    return Whitening(mean, directions[:, kept] / variances[kept].sqrt())
