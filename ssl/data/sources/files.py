"""What folders and lists of image files share: packed paths, labels and sizes, kept in the cache."""

import os
from functools import cached_property
from typing import Any

import numpy as np

from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.decoding.raster import Reduction
from nestling.ssl.data.sources.cache import Remembered
from nestling.ssl.data.sources.identity import of_packed
from nestling.ssl.data.sources.index import mark_used
from nestling.ssl.data.sources.indexed import IndexedSource
from nestling.ssl.data.sources.packed import PackedPaths
from nestling.ssl.data.sources.sides import FileSides


class FileSource(IndexedSource):
    """Image files by an index of their paths.

    The index holds the arrays of a `Packer`, `labels` where there are any, and the facts
    `class_names` and `passed_over`. Pickled, it is a name in the cache: a few hundred bytes.
    """

    def __init__(self, name: str, base: str, decoder: Decoder, index: Remembered) -> None:
        self.name, self._base, self._decoder, self._index = name, base, decoder, index

    @cached_property
    def _paths(self) -> PackedPaths:
        return PackedPaths.over(self._index.arrays)

    def __getstate__(self) -> dict[str, Any]:
        mark_used(self._index)  # by a run of weeks, whose loaders start anew again and again
        return {"name": self.name, "_base": self._base, "_decoder": self._decoder, "_index": self._index}

    def __len__(self) -> int:
        return len(self._paths)

    def path(self, index: int) -> str:
        return os.path.join(self._base, self._paths[index])

    def load(self, index: int, reduction: Reduction | None = None) -> np.ndarray:
        return self._decoder.file(self.path(index), reduction)

    def sides(self, indices: np.ndarray) -> np.ndarray:
        """The cache knows those of files that have not changed; else headers are read by several threads."""
        return FileSides(self.name, self.path, self._decoder, self._index).of(indices, len(self))

    def identities(self) -> np.ndarray:
        """Without a path built per image: a million take a second."""
        return of_packed(self._index.arrays, self._base)
