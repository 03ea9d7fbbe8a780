"""Alignment and uniformity against their definitions, pair by pair."""

import math

import pytest
import torch

from nestling.ssl.evaluation.unlabelled import sphere
from nestling.ssl.evaluation.unlabelled.sphere import alignment, uniformity


def rows(count, dim=6, seed=0):
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))


def on_sphere(features):
    return [row / row.norm() for row in features.double()]


def test_uniformity_is_the_mean_kernel_over_all_pairs_whatever_the_tiles(monkeypatch):
    features = rows(23)
    points = on_sphere(features)
    kernels = [
        math.exp(-2 * float((points[i] - points[j]).square().sum())) for i in range(23) for j in range(i)
    ]
    expected = math.log(sum(kernels) / len(kernels))
    for side in (1024, 23, 5, 1):
        monkeypatch.setattr(sphere, "SIDE", side)
        assert uniformity(4 * features) == pytest.approx(expected, rel=1e-12)


def test_alignment_is_the_mean_squared_distance_of_two_views():
    first, second = rows(9), rows(9, seed=1)
    pairs = zip(on_sphere(first), on_sphere(second), strict=True)
    expected = sum(float((x - y).square().sum()) for x, y in pairs) / 9
    assert alignment(first, 4 * second) == pytest.approx(expected, rel=1e-12)


def test_the_extremes():
    features = rows(9)
    assert alignment(features, 2 * features) == pytest.approx(0, abs=1e-12)
    assert alignment(features, -features) == pytest.approx(4)
    assert uniformity(torch.ones(5, 3)) == pytest.approx(0, abs=1e-12)
    assert uniformity(torch.tensor([[1.0, 0], [-1, 0]])) == pytest.approx(-8)
    assert math.isnan(uniformity(features[:1]))
