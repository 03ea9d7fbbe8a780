"""Many paths in a few arrays.

A Python list of paths is copied into every forked worker, page by page, as reference counts
change; arrays stay shared, and where they are mapped from a file, spawned workers share them too.
"""

import os
from array import array
from collections.abc import Iterable, Mapping

import numpy as np

END = b"\0"  # after every name: the one byte, besides the slash, that no name can hold
NO_FOLDER = -1


class Packer:
    """Builds the arrays; a folder's path is kept once, however many files follow in it."""

    def __init__(self) -> None:
        self.folders: dict[bytes, int] = {}  # to their numbers, which rise in the order of insertion
        self._names = bytearray()
        self._folder_of = array("i")

    def __len__(self) -> int:
        return len(self._folder_of)

    def add(self, path: bytes) -> None:
        """Append one path.

        Raises:
            ValueError: it holds a zero byte.
        """
        if END in path:
            raise ValueError(f"the path {path!r} holds a zero byte, which no file system allows")
        folder, slash, name = path.rpartition(b"/")
        self.extend(folder if slash else None, name + END, 1)

    def extend(self, folder: bytes | None, names: bytes, count: int) -> None:
        """Append files of one folder, their names each ended by a zero byte; None: names without a folder."""
        number = NO_FOLDER if folder is None else self.folders.setdefault(folder, len(self.folders))
        self._names += names
        self._folder_of.extend(array("i", (number,)) * count)

    def arrays(self) -> dict[str, np.ndarray]:
        """What `PackedPaths.over` reads; nothing can be added any more.

        Shape:
            returns: names (bytes,) uint8, name_ends (N,), folder_of (N,) int32, and the F folders as
                folders (bytes,) uint8, folder_ends (F,)
        """
        folders = b"".join(folder + END for folder in self.folders)
        names = np.frombuffer(self._names, dtype=np.uint8)
        return {
            "names": names,
            "name_ends": _ends(names),
            "folder_of": np.frombuffer(self._folder_of, dtype=np.int32),
            "folders": np.frombuffer(folders, dtype=np.uint8),
            "folder_ends": _ends(np.frombuffer(folders, dtype=np.uint8)),
        }


class PackedPaths:
    """A read-only sequence of paths; undecodable names survive.

    Raises:
        ValueError: a path holds a zero byte.
    """

    def __init__(self, paths: Iterable[str | bytes] = ()) -> None:
        packer = Packer()
        for path in paths:
            packer.add(os.fsencode(path))
        self._take(packer.arrays())

    @classmethod
    def over(cls, arrays: Mapping[str, np.ndarray]) -> "PackedPaths":
        """The paths in arrays that a `Packer` made, without a copy."""
        paths = cls.__new__(cls)
        paths._take(arrays)
        return paths

    def _take(self, arrays: Mapping[str, np.ndarray]) -> None:
        # Plain arrays: indexing a np.memmap takes several times as long, and pickles alike.
        self._names, self._name_ends = np.asarray(arrays["names"]), np.asarray(arrays["name_ends"])
        self._folders, self._folder_ends = np.asarray(arrays["folders"]), np.asarray(arrays["folder_ends"])
        self._folder_of = np.asarray(arrays["folder_of"])

    def __len__(self) -> int:
        return len(self._folder_of)

    def __getitem__(self, index: int) -> str:
        index = range(len(self))[index]
        name = _cut(self._names, self._name_ends, index)
        folder = int(self._folder_of[index])
        if folder != NO_FOLDER:
            name = _cut(self._folders, self._folder_ends, folder) + b"/" + name
        return os.fsdecode(name)


def _ends(ended: np.ndarray) -> np.ndarray:
    """Where each name's zero byte lies, in as few bytes as hold it."""
    ends = np.flatnonzero(ended == 0)
    return ends.astype(np.uint32 if len(ended) < 2**32 else np.uint64)


def _cut(names: np.ndarray, ends: np.ndarray, index: int) -> bytes:
    start = int(ends[index - 1]) + 1 if index else 0
    return names[start : int(ends[index])].tobytes()
