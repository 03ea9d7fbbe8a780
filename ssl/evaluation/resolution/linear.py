"""A linear classifier on frozen features, without a setting to tune.

Shapes used below: N images, D channels, C classes.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.linear.logistic import regularisation_path

DECAYS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)  # of the mean loss, on standardised features
CONSTANT = 1e-6  # of a channel's size: a deviation below is float32's rounding
HELD_OUT = 5  # one image in so many chooses among them

Classifier = Callable[[Tensor], Tensor]


def fit_linear(features: Tensor, labels: Tensor, num_classes: int) -> Classifier:
    """Softmax regression on standardised features, by L-BFGS: features (M, D) -> predicted classes (M,).

    min over W, b of mean cross-entropy + decay / 2 |W|^2. The decay is the one that classifies a fifth of
    each class's training images best, of equal ones the strongest; then all images are fitted.

    Shape:
        features: (N, D), on the device that computes; labels: (N,) in [0, C)

    Raises:
        UserError: fewer than two images.
    """
    if len(features) < 2:
        raise UserError(f"a linear classifier needs at least two training images and found {len(features)}")
    exact = features.double()
    mean, std = exact.mean(0), exact.std(0, correction=0)
    # A channel that never changes says nothing, however its rounding wavers.
    scale = torch.where(std > CONSTANT * exact.square().mean(0).sqrt(), 1 / std, 0)

    def standardised(rows: Tensor) -> Tensor:
        return ((rows.double() - mean) * scale).float()

    rows, labels = standardised(features), labels.to(features.device)
    held = _held_out(labels)
    decay = _best_decay(rows[~held], labels[~held], rows[held], labels[held], num_classes)
    (weight,), (bias,) = regularisation_path(rows, labels, num_classes, [1 / (decay * len(rows))])
    return lambda others: F.linear(standardised(others).double(), weight, bias).argmax(dim=1)


def _held_out(labels: Tensor) -> Tensor:
    """Every fifth image of each class, in the order of the dataset; a class of fewer stays whole.

    Shape:
        (N,) -> (N,) bool
    """
    order = labels.argsort(stable=True)
    counts = labels.bincount()
    starts = (counts.cumsum(0) - counts)[labels[order]]
    held = torch.zeros_like(labels, dtype=torch.bool)
    held[order] = (torch.arange(len(labels), device=labels.device) - starts) % HELD_OUT == HELD_OUT - 1
    return held


def _best_decay(
    rows: Tensor, labels: Tensor, held_rows: Tensor, held_labels: Tensor, num_classes: int
) -> float:
    """Of equal ones the strongest; a middle one where no class is large enough to hold an image out."""
    if not len(held_rows):
        return DECAYS[len(DECAYS) // 2]
    cs = [1 / (decay * len(rows)) for decay in DECAYS]
    weights, biases = regularisation_path(rows, labels, num_classes, cs)
    scores = held_rows.double() @ weights.mT + biases[:, None]  # decays M C
    return DECAYS[int((scores.argmax(dim=2) == held_labels).sum(dim=1).argmax())]
