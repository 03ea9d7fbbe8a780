import os
import pickle

import numpy as np
import pytest

from nestling.ssl.data.sources.packed import PackedPaths, Packer

PATHS = ["a", "", "/", "/a", "a/", "a//b", "猫/é/x", os.fsdecode(b"d\xff/\xfe"), "b" * 300, "猫/é/y", "a"]


def test_packed_paths_are_a_sequence():
    packed = PackedPaths(PATHS)
    assert list(packed) == PATHS
    assert packed[-1] == PATHS[-1]
    assert packed[np.int64(2)] == PATHS[2]
    with pytest.raises(IndexError):
        packed[len(PATHS)]


def test_bytes_are_taken_as_paths():
    assert list(PackedPaths([b"x/\xff", "x/y"])) == [os.fsdecode(b"x/\xff"), "x/y"]


def test_no_paths_are_a_sequence_too():
    assert len(PackedPaths()) == 0


def test_packed_paths_survive_pickling():
    assert list(pickle.loads(pickle.dumps(PackedPaths(PATHS)))) == PATHS


def test_a_zero_byte_is_refused():
    with pytest.raises(ValueError, match="zero byte"):
        PackedPaths(["a", "b\0c"])


def test_files_added_by_folder_equal_those_added_one_by_one():
    packer = Packer()
    packer.extend(b"x/y", b"1\x002\x00", 2)
    packer.extend(None, b"3\0", 1)
    packer.extend(b"x/y", b"4\0", 1)
    assert len(packer) == 4
    arrays = packer.arrays()
    expected = ["x/y/1", "x/y/2", "3", "x/y/4"]
    assert list(PackedPaths.over(arrays)) == expected
    one_by_one = Packer()
    for path in expected:
        one_by_one.add(path.encode())
    for name, array in one_by_one.arrays().items():
        assert np.array_equal(array, arrays[name]), name


def test_a_folder_costs_its_name_once():
    paths = [f"{'long' * 20}/{i:03d}" for i in range(1000)]
    assert sum(array.nbytes for array in _arrays(paths).values()) < 1000 * (4 + 4 + 4) + 200


def _arrays(paths):
    packer = Packer()
    for path in paths:
        packer.add(os.fsencode(path))
    return packer.arrays()
