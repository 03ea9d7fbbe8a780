"""Which images are the same file, told by 64-bit hashes of their names: millions in little memory.

Links are followed in folders, each of which is looked up once, not in the names of files. The hashes
hold within a process alone, as Python salts them.

Shapes used below: N images, F folders.
"""

import os
from array import array
from collections.abc import Iterable, Mapping

import numpy as np

from nestling.ssl.data.sources.packed import END, NO_FOLDER

MIXER = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no two folders become one
PART = 1 << 12  # names that are Python objects at once


def of_paths(paths: Iterable[str]) -> np.ndarray:
    """Of any paths.

    Shape:
        returns: (N,) uint64
    """
    folders: dict[str, int] = {}
    of_folders, of_names = array("q"), array("q")
    for path in paths:
        folder, name = os.path.split(path)
        if folder not in folders:
            folders[folder] = _of_folder(folder)
        of_folders.append(folders[folder])
        of_names.append(hash(os.fsencode(name)))
    return _mixed(np.array(of_folders), np.array(of_names))


def of_packed(arrays: Mapping[str, np.ndarray], base: str) -> np.ndarray:
    """Of packed paths that are absolute or begin at `base`.

    Shape:
        returns: (N,) uint64
    """
    folders = np.asarray(arrays["folders"]).tobytes().split(END)[:-1]
    of_folders = [_of_folder(os.path.join(base, os.fsdecode(folder))) for folder in folders]
    of_folders.append(_of_folder(base))  # the last one, for names without a folder
    folder_of = np.where(arrays["folder_of"] == NO_FOLDER, len(folders), arrays["folder_of"])
    names, ends = np.asarray(arrays["names"]), np.asarray(arrays["name_ends"])
    of_names = np.empty(len(ends), dtype=np.int64)
    for first in range(0, len(ends), PART):
        last = min(first + PART, len(ends))
        start = int(ends[first - 1]) + 1 if first else 0
        part = names[start : int(ends[last - 1])].tobytes().split(END)
        of_names[first:last] = [hash(name) for name in part]
    return _mixed(np.array(of_folders, dtype=np.int64)[folder_of], of_names)


def _of_folder(folder: str) -> int:
    return hash(os.fsencode(os.path.realpath(folder)))


def _mixed(folders: np.ndarray, names: np.ndarray) -> np.ndarray:
    return (folders.view(np.uint64) * MIXER) ^ names.view(np.uint64)
