"""Shorter sides: from headers, and from the cache where a file is as it was."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from planting import plant, settle
from shard_writing import encoded, pixels_of, write_tar

from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.sources.folder import Folder
from nestling.ssl.data.sources.lists import ImageList
from nestling.ssl.data.sources.shards import TarShards


@pytest.fixture
def images(tmp_path):
    root = plant(tmp_path / "images", "a/1.png", "b/x/2.png")
    settle(root)
    return Path(root)


@pytest.fixture
def cache(tmp_path):
    return str(tmp_path / "cache")


def spoil(path):
    """Make a file unreadable, unseen: its size and time stay."""
    before = os.stat(path)
    with open(path, "r+b") as file:
        file.write(bytes(before.st_size))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def sides_of(images, cache):
    return Folder(str(images), cache=cache).sides(np.arange(2)).tolist()


def test_sides_come_from_the_headers(tmp_path, cache):
    root = tmp_path / "images"
    plant(root, "a.png")
    Image.new("L", (5, 9)).save(root / "b.png")
    (root / "c.png").write_text("no image")
    folder = Folder(str(root), cache=cache)
    assert folder.sides(np.array([2, 1, 0, 1])).tolist() == [0, 5, 2, 5]
    assert folder.sides(np.array([], dtype=np.int64)).tolist() == []


def test_more_files_than_a_thread_takes_at_a_time_keep_their_order(tmp_path):
    for number in range(600):
        Image.new("L", (number + 1, 1000)).save(tmp_path / f"{number:03d}.png")
    asked = np.random.default_rng(0).permutation(600)
    assert np.array_equal(Folder(str(tmp_path)).sides(asked), asked + 1)


def test_a_second_start_reads_no_header_again(images, cache):
    assert Folder(str(images), cache=cache).sides(np.array([0])).tolist() == [2]
    spoil(images / "a" / "1.png")
    assert sides_of(images, cache) == [2, 2]
    spoil(images / "b" / "x" / "2.png")
    assert sides_of(images, cache) == [2, 2]


def test_a_file_written_over_is_read_anew(images, cache):
    assert sides_of(images, cache) == [2, 2]
    Image.new("L", (50, 60)).save(images / "a" / "1.png")
    assert sides_of(images, cache) == [50, 2]


def test_a_file_that_changes_while_clocks_stand_still_is_read_anew(images, cache):
    os.utime(images / "a" / "1.png")  # now
    assert sides_of(images, cache) == [2, 2]
    spoil(images / "a" / "1.png")
    assert sides_of(images, cache) == [0, 2]


def test_a_file_that_could_not_be_read_is_tried_again(images, cache):
    there, away = images / "a" / "1.png", images / "a.away"
    os.rename(there, away)
    os.symlink(images / "b", there)  # a folder, by the name of the file
    listed = images / "list.txt"
    listed.write_text("a/1.png\n")
    settle(listed.parent)
    assert ImageList(str(listed), cache=cache).sides(np.array([0])).tolist() == [0]
    os.remove(there)
    os.rename(away, there)
    assert ImageList(str(listed), cache=cache).sides(np.array([0])).tolist() == [2]


def test_arrays_have_other_sides_for_other_channels(tmp_path, cache):
    np.save(tmp_path / "a.npy", np.zeros((3, 4, 5), dtype=np.uint8))
    (tmp_path / "list.txt").write_text("a.npy\n")
    settle(tmp_path)
    for _ in range(2):
        for mode, channels, side in (("rgb", 3, 4), ("unchanged", 5, 3), ("unchanged", 3, 4)):
            decoder = Decoder(mode=mode, channels=channels)
            found = ImageList(str(tmp_path / "list.txt"), decoder, cache=cache).sides(np.array([0]))
            assert (mode, channels, found.tolist()) == (mode, channels, [side])


@pytest.mark.parametrize("damage", [b"", b"\x93NUMPY"])
def test_damaged_sides_are_read_again(images, cache, damage):
    assert sides_of(images, cache) == [2, 2]
    (kept,) = Path(cache).rglob("sides*.npy")
    kept.write_bytes(damage)
    assert sides_of(images, cache) == [2, 2]


def test_sides_need_no_cache(images, tmp_path):
    (tmp_path / "file").touch()
    assert sides_of(images, str(tmp_path / "file" / "cache")) == [2, 2]


def test_sides_in_shards_are_not_read_again(tmp_path, cache):
    shard = write_tar(tmp_path / "a.tar", [("a.png", encoded(pixels_of(0))), ("b.png", b"none")])
    os.utime(shard, (1e9, 1e9))
    for _ in range(2):
        assert TarShards(shard, Decoder(), cache=cache).sides(np.array([1, 0])).tolist() == [0, 6]
        spoil(shard)


def test_sides_in_a_shard_written_over_are_read_again(tmp_path, cache):
    for size in ((6, 9), (9, 7)):
        shard = write_tar(tmp_path / "a.tar", [("a.png", encoded(pixels_of(0, size)))])
        assert TarShards(shard, Decoder(), cache=cache).sides(np.array([0])).tolist() == [min(size)]
