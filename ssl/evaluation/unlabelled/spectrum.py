"""How many directions features fill, and how fast their spectrum decays.

Shapes used below: N images, D channels.
"""

import torch
from torch import Tensor

EPSILON = 1e-7  # of RankMe, as in the paper
FIRST_RANK, LAST_RANK = 5, 100  # of the fit: the first few directions stand outside the power law
NOISE = 1e-7  # of the largest singular value: what is below is rounding of float32 features


def rankme(features: Tensor) -> float:
    """The effective rank of the features, from 1 to min(N, D) (RankMe, Garrido et al., 2023, equations 1-2).

    exp(-sum_k p_k log p_k) with p_k = s_k / |s|_1 + 1e-7, of the singular values s of the features as they
    are, not centered.

    Shape:
        features: (N, D), any float type
    """
    values = torch.linalg.svdvals(features.double())
    total = values.sum()
    shares = (values / total if total > 0 else values) + EPSILON
    return float((-(shares * shares.log()).sum()).exp())


def alpha_req(features: Tensor) -> float:
    """The exponent a where the eigenvalues of the covariance fall as rank^-a (a-ReQ, Agrawal et al., 2022).

    The least-squares line through (log rank, log eigenvalue) over ranks 5 to 100, or as far as eigenvalues
    stand out of the rounding. Near 1 is what the paper finds to generalise best; above, few directions carry
    all; below, noise does. NaN where fewer than two ranks are left.

    Shape:
        features: (N, D), any float type
    """
    exact = features.double()
    centered = exact - exact.mean(dim=0)
    values = torch.linalg.svdvals(centered)
    # Against the features themselves: of a constant network all that is left is rounding.
    usable = int((values > NOISE * exact.norm()).sum())
    last = min(LAST_RANK, usable)
    if last <= FIRST_RANK:
        return float("nan")
    x = torch.arange(FIRST_RANK, last + 1, dtype=torch.float64).log()
    y = 2 * values[FIRST_RANK - 1 : last].log()  # an eigenvalue is a squared singular value, up to a factor
    x -= x.mean()
    return float(-(x * y).sum() / x.square().sum())
