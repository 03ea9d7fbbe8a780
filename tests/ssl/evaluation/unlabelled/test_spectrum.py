"""RankMe and a-ReQ against their definitions and on spectra that are known."""

import math

import numpy as np
import pytest
import torch

from nestling.ssl.evaluation.unlabelled.spectrum import alpha_req, rankme


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_power_law(exponent, num_images=300, dim=120):
    """Centered features whose covariance has the eigenvalues rank^-exponent."""
    ones = torch.ones(num_images, 1, dtype=torch.float64)
    directions = torch.linalg.qr(torch.cat([ones, normal(num_images, dim)], dim=1))[0][:, 1:]
    rotation = torch.linalg.qr(normal(dim, dim, seed=1))[0]
    return directions * torch.arange(1, dim + 1).double() ** (-exponent / 2) @ rotation


def test_rankme_is_the_exponential_of_the_entropy_of_the_singular_values():
    features = normal(40, 12) * torch.arange(1, 13)
    values = np.linalg.svd(features.numpy(), compute_uv=False)
    entropy = 0.0
    for value in values:
        share = value / values.sum() + 1e-7
        entropy -= share * math.log(share)
    assert rankme(features) == pytest.approx(math.exp(entropy), rel=1e-12)
    assert rankme(3 * features.float()) == pytest.approx(math.exp(entropy), rel=1e-5)


def test_rankme_counts_the_directions_that_are_filled():
    assert rankme(normal(5000, 32)) == pytest.approx(32, rel=0.01)
    assert rankme(torch.outer(normal(50), normal(32))) == pytest.approx(1, abs=1e-3)
    assert rankme(normal(50, 5) @ torch.eye(5, 32).double()) == pytest.approx(5, rel=0.05)


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_alpha_is_the_exponent_of_a_power_law_wherever_its_features_lie(exponent):
    features = with_power_law(exponent)
    assert alpha_req(features) == pytest.approx(exponent, abs=1e-9)
    assert alpha_req(features + 7) == pytest.approx(exponent, abs=1e-9)
    assert alpha_req(features.float()) == pytest.approx(exponent, abs=1e-3)


def test_alpha_is_the_slope_that_numpy_fits_over_ranks_5_to_100():
    features = normal(400, 150) * torch.rand(150, generator=torch.Generator().manual_seed(3)).double()
    eigenvalues = np.linalg.eigvalsh(np.cov(features.numpy().T))[::-1]
    slope, _ = np.polyfit(np.log(np.arange(5, 101)), np.log(eigenvalues[4:100]), 1)
    assert alpha_req(features) == pytest.approx(-slope, rel=1e-9)


def test_alpha_of_too_few_directions_is_not_a_number():
    constant = torch.rand(20, generator=torch.Generator().manual_seed(0)).expand(50, 20)
    for features in (constant, normal(6, 32), normal(50, 5)):
        assert math.isnan(alpha_req(features))
    assert math.isfinite(alpha_req(normal(7, 32)))
