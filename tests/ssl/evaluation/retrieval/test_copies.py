"""Vectors, whitening and mAP of copy detection against plain definitions."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from nestling.backbones import Features
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.retrieval.copies import Squeezed, copy_vector, precisions
from nestling.ssl.evaluation.retrieval.whitening import learn_whitening


def test_a_vector_is_the_class_token_beside_the_fourth_power_mean():
    patches = torch.tensor([[[1.0, -3.0], [2.0, 0.5]]])
    vector = copy_vector(Features(torch.tensor([[7.0, 8.0]]), patches, (1, 2)))
    wanted = [7, 8, ((1 + 16) / 2) ** 0.25, ((1e-24 + 0.5**4) / 2) ** 0.25]
    assert vector[0].tolist() == pytest.approx(wanted)


def test_whitening_equals_scikit_learns_pca():
    random = np.random.default_rng(0)
    rows = random.normal(size=(50, 6)) @ random.normal(size=(6, 6)) + 3
    new = random.normal(size=(4, 6))
    ours = learn_whitening(torch.from_numpy(rows))(torch.from_numpy(new)).numpy()
    theirs = PCA(whiten=True).fit(rows).transform(new) * np.sqrt(50 / 49)  # it divides by n - 1
    assert np.abs(ours[:, ::-1]) == pytest.approx(np.abs(theirs))


def test_whitening_drops_directions_without_variance_and_needs_some():
    rows = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    assert learn_whitening(rows)(rows).shape == (4, 3)
    with pytest.raises(UserError, match=r"whitening: 3 images whose features don't differ"):
        learn_whitening(torch.ones(3, 5))


def test_originals_beyond_the_depth_count_as_not_found():
    database = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]], dtype=torch.float64)
    queries = database[:1]
    assert precisions(queries, database, [[0]], 3) == [1]
    assert precisions(queries, database, [[1]], 3) == [pytest.approx(0.25)]
    assert precisions(queries, database, [[1]], 1) == [0]
    assert precisions(queries, database, [[0, 2]], 2) == [pytest.approx(0.5)]


def test_the_whole_image_is_squeezed_to_a_square():
    image = np.zeros((10, 30, 3), np.uint8)
    image[:, 15:] = 250
    square = Squeezed(8)(image, 0)
    assert square.shape == (3, 8, 8)
    assert (square[0, :, 0] == 0).all()
    assert (square[0, :, -1] == 250).all()
