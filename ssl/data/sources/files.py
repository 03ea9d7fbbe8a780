"""What folders and lists of image files share: packed paths, labels and sizes, kept in the cache."""

import os
from functools import cached_property
from typing import Any

import numpy as np

from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.sources.base import ImageSource
from nestling.ssl.data.sources.cache import Remembered
from nestling.ssl.data.sources.identity import of_packed
from nestling.ssl.data.sources.index import mark_used
from nestling.ssl.data.sources.packed import PackedPaths
from nestling.ssl.data.sources.sides import FileSides


class FileSource(ImageSource):
    """Image files by an index of their paths.

    The index holds the arrays of a `Packer`, `labels` where there are any, and the facts
    `class_names` and `passed_over`. Pickled, it is a name in the cache: a few hundred bytes.
    """

    def __init__(self, name: str, base: str, decoder: Decoder, index: Remembered) -> None:
        self.name, self._base, self._decoder, self._index = name, base, decoder, index

    # Read from the index at first use: in a loader process a lost one is then an error of an image.

    @cached_property
    def _paths(self) -> PackedPaths:
        return PackedPaths.over(self._index.arrays)

    @cached_property
    def labels(self) -> np.ndarray | None:  # type: ignore[override]
        """Numbers of classes, where the index has them."""
        return np.asarray(self._index.arrays["labels"]) if "labels" in self._index.arrays else None

    @cached_property
    def class_names(self) -> list[str] | None:  # type: ignore[override]
        """The classes, where there are labels."""
        names: list[str] | None = self._index.facts["class_names"]
        return names

    @cached_property
    def passed_over(self) -> str:  # type: ignore[override]
        """What was there beside the images."""
        said: str = self._index.facts["passed_over"]
        return said

    def __getstate__(self) -> dict[str, Any]:
        mark_used(self._index)  # by a run of weeks, whose loaders start anew again and again
        return {"name": self.name, "_base": self._base, "_decoder": self._decoder, "_index": self._index}

    def __len__(self) -> int:
        return len(self._paths)

    def path(self, index: int) -> str:
        return os.path.join(self._base, self._paths[index])

    def load(self, index: int) -> np.ndarray:
        return self._decoder.file(self.path(index))

    def sides(self, indices: np.ndarray) -> np.ndarray:
        """The cache knows those of files that have not changed; else headers are read by several threads."""
        return FileSides(self.name, self.path, self._decoder, self._index).of(indices, len(self))

    def identities(self) -> np.ndarray:
        """Without a path built per image: a million take a second."""
        return of_packed(self._index.arrays, self._base)
