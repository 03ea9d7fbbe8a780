import pickle

import numpy as np
import pytest
from planting import plant

from nestling.ssl.config import Config
from nestling.ssl.data.sources.base import Subset, holdout
from nestling.ssl.data.sources.folder import Folder
from nestling.ssl.data.sources.opening import open_pair
from nestling.ssl.errors import UserError


def test_subsets_survive_pickling(tmp_path):
    folder = Folder(plant(tmp_path, "a/1.png", "b/1.png", "b/2.png"))
    again = pickle.loads(pickle.dumps(Subset(folder, [2, 0])))
    assert again.path(0) == folder.path(2)
    assert again.labels.tolist() == [1, 0]
    assert np.array_equal(again.load(1), folder.load(0))


def test_a_subset_of_a_subset_holds_one_list_of_indices(tmp_path):
    folder = Folder(plant(tmp_path, *(f"{i}.png" for i in range(9))))
    inner = Subset(folder, [1, 3, 5, 7])
    inner.passed_over = "5 others"
    outer = Subset(inner, [1, 3])
    assert outer.source is folder
    assert [outer.path(i) for i in range(2)] == [folder.path(3), folder.path(7)]
    assert outer.passed_over == "5 others"


def test_the_blocks_of_a_subset_end_where_theirs_do(tmp_path):
    folder = Folder(plant(tmp_path, *(f"{i}.png" for i in range(9))))
    folder.blocks = np.array([3, 5, 9])
    inner = Subset(folder, [0, 1, 4, 6, 7, 8])
    assert inner.blocks.tolist() == [2, 3, 6]
    assert Subset(inner, [1, 2, 5]).blocks.tolist() == [1, 2, 3]


def test_a_pickled_subset_costs_four_bytes_an_image(tmp_path):
    folder = Folder(plant(tmp_path, "a/1.png", "b/1.png"))
    small, large = (len(pickle.dumps(Subset(folder, np.zeros(count, np.int64)))) for count in (1000, 2000))
    assert large - small == 4000


def test_holdout_splits_exactly_and_alike_every_time(tmp_path):
    folder = Folder(plant(tmp_path, *(f"{c}/{i}.png" for c in "ab" for i in range(20))))
    train, val = holdout(folder, 0.1, seed=3)
    assert (len(train), len(val)) == (36, 4)
    assert sorted([*train.indices, *val.indices]) == list(range(40))
    assert np.array_equal(holdout(folder, 0.1, seed=3)[1].indices, val.indices)
    assert any(not np.array_equal(holdout(folder, 0.1, seed=s)[1].indices, val.indices) for s in range(3))
    assert val.labels.tolist() == folder.labels[val.indices].tolist()


def test_an_image_more_moves_at_most_one_other_out_of_the_holdout(tmp_path):
    folder = Folder(plant(tmp_path, *(f"{i:03d}.png" for i in range(41))))
    before = set(holdout(Subset(folder, range(40)), 0.2, seed=0)[1].indices.tolist())
    after = set(holdout(folder, 0.2, seed=0)[1].indices.tolist())
    assert len(before - after) <= 1


def test_holdout_keeps_one_image_on_either_side(tmp_path):
    folder = Folder(plant(tmp_path, "1.png", "2.png"))
    assert [len(part) for part in holdout(folder, 0.01, 0)] == [1, 1]
    assert [len(part) for part in holdout(folder, 0.9, 0)] == [1, 1]
    assert [len(part) for part in holdout(folder, 0, 0)] == [2, 0]
    with pytest.raises(UserError, match=r"data\.holdout"):
        holdout(Subset(folder, [0]), 0.1, 0)


def test_open_pair_takes_the_named_the_held_out_or_no_validation_images(tmp_path):
    cfg = Config()
    cfg.data.train = plant(tmp_path / "train", *(f"{c}/{i}.png" for c in "ab" for i in range(5)))
    train, val = open_pair(cfg)
    assert (len(train), len(val)) == (9, 1)
    cfg.data.val = plant(tmp_path / "val", "a/1.png", "b/1.png")
    assert [len(source) for source in open_pair(cfg)] == [10, 2]
    cfg.data.val, cfg.data.train = None, plant(tmp_path / "flat", "1.png", "2.png")
    train, val = open_pair(cfg)
    assert len(train) == 2
    assert val is None
