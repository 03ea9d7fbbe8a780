"""Many strings in two arrays.

A Python list of paths is copied into every forked worker, page by page, as reference counts
change; two arrays stay shared.
"""

import os
from collections.abc import Iterable

import numpy as np


class PackedPaths:
    """A read-only sequence of paths, their bytes end to end; undecodable names survive."""

    def __init__(self, paths: Iterable[str]) -> None:
        encoded = [os.fsencode(path) for path in paths]
        self._bytes = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        self._ends = np.cumsum([len(path) for path in encoded], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        index = range(len(self))[index]
        start = self._ends[index - 1] if index else 0
        return os.fsdecode(self._bytes[start : self._ends[index]].tobytes())
