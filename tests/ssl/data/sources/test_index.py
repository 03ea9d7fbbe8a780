import os
import pickle
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from planting import plant, settle

from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.sources.cache import Remembered
from nestling.ssl.data.sources.folder import Folder
from nestling.ssl.data.sources.index import is_settled, keep, kept, key_of

A_MONTH = 31 * 24 * 3600


@pytest.fixture
def images(tmp_path):
    """Two settled class folders, one with a link that leads nowhere."""
    root = plant(tmp_path / "images", "a/1.png", "b/x/2.png")
    os.symlink(tmp_path / "later.png", tmp_path / "images" / "a" / "link.png")
    settle(root)
    return Path(root)


@pytest.fixture
def cache(tmp_path):
    return str(tmp_path / "cache")


def names_in(folder):
    return [os.path.relpath(folder.path(i), folder.name) for i in range(len(folder))]


def indexes(cache):
    return sorted(Path(cache, "indexes").iterdir())


def add_in_secret(folder, name):
    """A new image in a folder that says it has not changed."""
    times = os.stat(folder)
    plant(folder, name)
    os.utime(folder, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_a_second_start_takes_what_the_first_found(images, cache):
    first = Folder(str(images), cache=cache)
    add_in_secret(images / "a", "0.png")
    second = Folder(str(images), cache=cache)
    assert names_in(second) == names_in(first) == ["a/1.png", "b/x/2.png"]
    assert second.labels.tolist() == first.labels.tolist() == [0, 1]
    assert second.class_names == first.class_names
    assert second.passed_over == first.passed_over == "1 broken link (a/link.png)"


def test_a_first_start_by_the_same_path_as_a_link_scans_for_itself(images, cache, tmp_path):
    Folder(str(images), cache=cache)
    os.symlink(images, tmp_path / "link")
    assert len(Folder(str(tmp_path / "link"), cache=cache)) == 2
    assert len(indexes(cache)) == 2


@pytest.mark.parametrize("change", ["add", "remove", "rename", "new folder", "mend", "replace a folder"])
def test_whatever_changes_is_seen(images, cache, change):
    before = names_in(Folder(str(images), cache=cache))
    if change == "add":
        plant(images, "b/x/3.png")
    elif change == "remove":
        (images / "b/x/2.png").unlink()
    elif change == "rename":
        (images / "a/1.png").rename(images / "a/9.png")
    elif change == "new folder":
        plant(images, "c/1.png")
    elif change == "mend":
        plant(images.parent, "later.png")
    else:
        shutil.rmtree(images / "b/x")
        plant(images, "b/x/7.png")
    after = names_in(Folder(str(images), cache=cache))
    assert after != before
    assert after == names_in(Folder(str(images), cache=f"{cache}2"))


def test_a_folder_scanned_right_after_a_change_is_scanned_again(tmp_path, cache):
    root = plant(tmp_path / "images", "1.png")
    Folder(root, cache=cache)
    add_in_secret(root, "2.png")
    assert len(Folder(root, cache=cache)) == 2


def test_a_run_that_is_one_no_longer_is_seen(images, cache):
    plant(images, "run/picture.png")
    (images / "run" / "environment.json").write_text('{"nestling": "1"}')
    settle(images)
    assert len(Folder(str(images), cache=cache)) == 2
    (images / "run" / "environment.json").unlink()
    assert len(Folder(str(images), cache=cache)) == 3


def test_a_run_that_goes_on_below_the_root_keeps_the_index(images, cache):
    plant(images, "run/picture.png")
    (images / "run" / "environment.json").write_text('{"nestling": "1"}')
    settle(images)
    Folder(str(images), cache=cache)
    (images / "run" / "log.jsonl").write_text("{}\n")
    add_in_secret(images / "a", "0.png")
    assert len(Folder(str(images), cache=cache)) == 2


def test_other_rules_have_an_index_of_their_own(images, cache):
    np.save(images / "a" / "0.npy", np.zeros((2, 2)))
    settle(images)
    lengths = [len(Folder(str(images), Decoder(mode=mode), cache=cache)) for mode in ("rgb", "unchanged") * 2]
    assert lengths == [2, 3, 2, 3]


def test_each_damaged_file_of_an_index_is_noticed_and_mended(images, cache):
    Folder(str(images), cache=cache)
    for name in sorted(os.listdir(indexes(cache)[0])):
        file = indexes(cache)[0] / name
        content = file.read_bytes()
        for damaged in (content[:-1], content[:-1] + bytes([content[-1] ^ 1]), b""):
            file.write_bytes(damaged)
            assert names_in(Folder(str(images), cache=cache)) == ["a/1.png", "b/x/2.png"], name
            assert file.read_bytes() == content, name


def test_a_cache_that_cannot_be_written_is_done_without(images, tmp_path):
    (tmp_path / "file").touch()
    for _ in range(2):
        folder = Folder(str(images), cache=str(tmp_path / "file" / "cache"))
        again = pickle.loads(pickle.dumps(folder))
        assert names_in(again) == ["a/1.png", "b/x/2.png"]
        assert again.labels.tolist() == [0, 1]


def test_a_cache_below_the_root_is_no_part_of_it(images):
    cache, decoder = str(images / "cache"), Decoder(mode="unchanged")
    for _ in range(2):
        assert names_in(Folder(str(images), decoder, cache=cache)) == ["a/1.png", "b/x/2.png"]
        settle(images)
    Folder(str(images), decoder, cache=cache)
    add_in_secret(images / "a", "0.png")
    assert len(Folder(str(images), decoder, cache=cache)) == 2


def test_a_later_scan_leaves_a_running_source_as_it_was(images, cache):
    pickled = pickle.dumps(Folder(str(images), cache=cache))
    plant(images, "a/0.png")
    assert len(Folder(str(images), cache=cache)) == 3
    assert names_in(pickle.loads(pickled)) == ["a/1.png", "b/x/2.png"]


def test_a_pickled_folder_is_small(tmp_path, cache):
    root = plant(tmp_path / "images", "a/1.png", "b/1.png")
    for number in range(500):
        (Path(root) / "a" / f"{number:06d}.png").touch()
    assert len(pickle.dumps(Folder(root, cache=cache))) < 2000


def test_indexes_that_nobody_used_for_a_month_go_at_the_next_scan(images, cache):
    Folder(str(images), cache=cache)
    plant(images, "a/2.png")
    Folder(str(images), cache=cache)
    old, recent = indexes(cache)
    torn = old.with_name(f".{old.name}.0123")
    torn.mkdir()
    for folder in (old, torn):
        os.utime(folder, (time.time() - A_MONTH,) * 2)
    plant(images, "a/3.png")
    Folder(str(images), cache=cache)
    assert not old.exists()
    assert not torn.exists()
    assert recent.exists()
    assert len(indexes(cache)) == 2


def test_use_keeps_an_index_from_going(images, cache):
    folder = Folder(str(images), cache=cache)
    (index,) = indexes(cache)
    for use in (lambda: Folder(str(images), cache=cache), lambda: pickle.dumps(folder)):
        os.utime(index, (time.time() - A_MONTH,) * 2)
        use()
        assert time.time() - index.stat().st_mtime < 60


def test_an_index_comes_back_as_it_was(cache):
    arrays = {
        "a": np.arange(5, dtype=np.int32),
        "b": np.zeros((0, 3)),
        "c": np.array([[1, 2]], dtype=np.uint64),
    }
    facts = {"name": os.fsdecode(b"\xff"), "none": None, "list": ["é"]}
    key = key_of("/somewhere", "rule")
    keep(Remembered(arrays, facts), cache, key)
    (index,) = kept(cache, key)
    assert index.facts == facts
    assert {name: array.tolist() for name, array in index.arrays.items()} == {
        name: array.tolist() for name, array in arrays.items()
    }
    assert list(kept(cache, key_of("/somewhere", "other rule"))) == []


def test_times_are_settled_two_seconds_later():
    stamps = np.array([[1, 2, 10**18], [1, 3, 5]], dtype=np.uint64)
    assert is_settled(stamps, 10**18 + 2 * 10**9 + 1)
    assert not is_settled(stamps, 10**18 + 2 * 10**9)
