"""Rows of a list that name one file stay on one side; all else is split as ever."""

import numpy as np
import pytest
from planting import plant

from nestling.ssl.data.sources.base import Subset, holdout
from nestling.ssl.data.sources.folder import Folder
from nestling.ssl.data.sources.lists import ImageList
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.labels import refuse_shared_files
from nestling.ssl.randomness import Stream, generator


def listed(tmp_path, names):
    rows = "".join(f"{name},{number % 2}\n" for number, name in enumerate(names))
    (tmp_path / "list.csv").write_text(f"path,label\n{rows}")
    return ImageList(str(tmp_path / "list.csv"))


def smallest_draws(count, share, seed):
    draws = generator(seed, Stream.HOLDOUT).random(count)
    return sorted(np.argsort(draws, kind="stable")[: round(share * count)].tolist())


def test_folders_and_lists_without_repeats_are_split_by_their_own_draws(tmp_path):
    names = [f"{c}/{i}.png" for c in "ab" for i in range(20)]
    folder = Folder(plant(tmp_path / "images", *names))
    for seed in range(3):
        for source in (folder, listed(tmp_path, names)):
            assert holdout(source, 0.2, seed)[1].indices.tolist() == smallest_draws(40, 0.2, seed)


@pytest.mark.parametrize("times", [2, 3, 7])
def test_rows_of_one_file_stay_together(tmp_path, times):
    names = [f"{number % 30}.png" for number in range(30 * times)]
    source = listed(tmp_path, names)
    for seed in range(20):
        train, val = holdout(source, 0.2, seed)
        assert sorted([*train.indices, *val.indices]) == list(range(len(names)))
        assert not {names[index] for index in train.indices} & {names[index] for index in val.indices}
        assert 6 * times - times < len(val) <= 6 * times
        refuse_shared_files(train, val)


def test_a_file_named_in_two_ways_is_one(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    ways = ["real/{}.png", "link/{}.png", "./real/{}.png", str(tmp_path / "real" / "{}.png")]
    source = listed(tmp_path, [ways[number // 10].format(number % 10) for number in range(40)])
    for seed in range(20):
        assert set(np.bincount(holdout(source, 0.3, seed)[1].indices % 10, minlength=10).tolist()) == {0, 4}


def test_a_part_of_a_list_is_split_alike(tmp_path):
    names = ["0.png"] * 3 + [f"{number}.png" for number in range(1, 8)] + ["7.png", "0.png"]
    part = Subset(listed(tmp_path, names), [1, 3, 5, 9, 10, 11])
    for seed in range(20):
        train, val = holdout(part, 0.3, seed)
        assert not {names[index] for index in train.indices} & {names[index] for index in val.indices}
        assert len(train) + len(val) == 6


def test_a_file_repeated_often_leaves_one_on_either_side(tmp_path):
    source = listed(tmp_path, ["a.png"] * 9 + ["b.png"])
    for seed in range(20):
        assert sorted(map(len, holdout(source, 0.3, seed))) == [1, 9]


def test_one_file_however_often_cannot_be_split(tmp_path):
    with pytest.raises(UserError, match=r"1 image can't be split by data\.holdout"):
        holdout(listed(tmp_path, ["a.png", "./a.png"]), 0.5, 0)


def test_names_are_shown_on_one_line(tmp_path):
    folder = Folder(plant(tmp_path / "a\nb", "1.png"))
    with pytest.raises(UserError, match=r"a\\nb: 1 image can't be split"):
        holdout(folder, 0.5, 0)
