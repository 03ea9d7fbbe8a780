import numpy as np
import pytest

from nestling.ssl.randomness import Stream, generator


def test_equal_coordinates_give_equal_numbers_whatever_was_drawn_before():
    first = generator(7, Stream.VIEWS, 3, 11)
    np.random.seed(1)
    generator(7, Stream.VIEWS, 3, 12).random(1000)
    assert np.array_equal(first.random(50), generator(7, Stream.VIEWS, 3, 11).random(50))


def test_every_coordinate_changes_all_numbers():
    coordinates = [
        (seed, stream, epoch, index)
        for seed in (0, 1, 2**31 - 1)
        for stream in (Stream.ORDER, Stream.VIEWS)
        for epoch in (0, 1)
        for index in (0, 1, 10**7)
    ]
    drawn = np.concatenate([generator(*each).integers(2**63, size=20) for each in coordinates])
    assert len(np.unique(drawn)) == drawn.size


def test_neighbouring_coordinates_are_uncorrelated_and_uniform():
    drawn = np.stack([generator(0, Stream.VIEWS, 0, index).random(8) for index in range(4000)])
    assert np.abs(drawn.mean(axis=0) - 0.5).max() < 0.02
    assert np.abs(np.corrcoef(drawn[1:].T, drawn[:-1].T) - np.eye(16)).max() < 0.08


def test_too_many_coordinates_are_refused():
    with pytest.raises(AssertionError):
        generator(0, Stream.VIEWS, 1, 2, 3, 4)
