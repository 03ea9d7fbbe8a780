"""How features lie on the unit sphere (Wang & Isola, 2020, section 4.1).

Shapes used below: N images, D channels.
"""

import torch.nn.functional as F
from torch import Tensor

SIDE = 1024  # images against images at once: 8 MB in float64


def alignment(first: Tensor, second: Tensor) -> float:
    """Mean of |f(x) - f(y)|^2 over two views x, y of each image: 0 where views change nothing, at most 4.

    Shape:
        first, second: (N, D), any float type; row i of both is image i
    """
    return float((_on_sphere(first) - _on_sphere(second)).square().sum(dim=1).mean())


def uniformity(features: Tensor) -> float:
    """log of the mean of exp(-2 |f(x) - f(y)|^2) over all pairs of two images: 0 if alike, at least -8.

    The lower, the more evenly the features cover the sphere. NaN of fewer than two images.

    Shape:
        features: (N, D), any float type
    """
    rows = _on_sphere(features)
    count = len(rows)
    if count < 2:
        return float("nan")
    total = rows.new_zeros(())
    for start in range(0, count, SIDE):
        part = rows[start : start + SIDE]
        total += _kernel(part, part).triu(diagonal=1).sum()
        for other in rows[start + SIDE :].split(SIDE):
            total += _kernel(part, other).sum()
    return float((total / (count * (count - 1) / 2)).log())


def _kernel(rows: Tensor, others: Tensor) -> Tensor:
    """exp(-2 |x - y|^2) of unit vectors, whose squared distance is 2 - 2 x.y."""
    return (rows @ others.mT).sub_(1).mul_(4).exp_()


def _on_sphere(features: Tensor) -> Tensor:
    return F.normalize(features.double(), dim=1, eps=1e-30)
