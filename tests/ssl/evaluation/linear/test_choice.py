"""The images that a head is chosen on."""

import numpy as np

from nestling.ssl.evaluation.linear.choice import split_by_class

LABELS = np.repeat([0, 1, 2, 3], [40, 20, 2, 1])[np.random.default_rng(0).permutation(63)]


def test_each_class_gives_its_share_and_one_image_is_learned():
    learned, held = split_by_class(LABELS, 0.1, 0)
    assert np.array_equal(np.sort(np.concatenate([learned, held])), np.arange(63))
    assert np.bincount(LABELS[held], minlength=4).tolist() == [4, 2, 1, 0]
    assert (np.diff(learned) > 0).all()
    assert (np.diff(held) > 0).all()


def test_the_split_is_of_the_seed_alone():
    splits = [split_by_class(LABELS, 0.2, seed)[1].tolist() for seed in (3, 3, 4)]
    assert splits[0] == splits[1] != splits[2]
    assert len(split_by_class(LABELS, 0.0, 0)[1]) == 0


def test_rows_of_one_file_stay_on_one_side():
    labels, repeats = np.zeros(60, dtype=int), np.arange(60) // 3 * 3
    learned, held = split_by_class(labels, 0.5, 0, repeats)
    assert len(held) == 30
    assert not set(repeats[learned]) & set(repeats[held])
    same = split_by_class(labels, 0.5, 0, np.zeros(60, dtype=int))
    assert list(map(len, same)) == [60, 0]
