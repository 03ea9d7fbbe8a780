"""What folders and lists of image files share: packed paths, labels and sizes, kept in the cache."""

import logging
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.sources.base import ImageSource
from nestling.ssl.data.sources.cache import Remembered
from nestling.ssl.data.sources.index import mark_used
from nestling.ssl.data.sources.packed import PackedPaths
from nestling.ssl.names import printable

logger = logging.getLogger("nestling")

SIDES = "sides.npy"  # beside the arrays of an index
UNKNOWN = -1
READERS = 8  # threads that read headers: mostly they wait for the disk
MANY = 5000  # headers whose reading is worth a word: a second or more
PART = 256  # images that a thread takes at a time


class FileSource(ImageSource):
    """Image files by an index of their paths.

    The index holds the arrays of a `Packer`, `labels` where there are any, and the facts
    `class_names` and `passed_over`. Pickled, it is a name in the cache: a few hundred bytes.
    """

    def __init__(self, name: str, base: str, decoder: Decoder, index: Remembered) -> None:
        self.name, self._base, self._decoder = name, base, decoder
        self._take(index)

    def _take(self, index: Remembered) -> None:
        self._index = index
        self._paths = PackedPaths.over(index.arrays)
        self.labels = np.asarray(index.arrays["labels"]) if "labels" in index.arrays else None
        self.class_names = index.facts["class_names"]
        self.passed_over = index.facts["passed_over"]

    def __getstate__(self) -> dict[str, Any]:
        mark_used(self._index)  # by a run of weeks, whose loaders start anew again and again
        return {"name": self.name, "base": self._base, "decoder": self._decoder, "index": self._index}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.name, self._base, self._decoder = state["name"], state["base"], state["decoder"]
        self._take(state["index"])

    def __len__(self) -> int:
        return len(self._paths)

    def path(self, index: int) -> str:
        return os.path.join(self._base, self._paths[index])

    def load(self, index: int) -> np.ndarray:
        return self._decoder.file(self.path(index))

    def sides(self, indices: np.ndarray) -> np.ndarray:
        """Of files that the cache doesn't know yet the headers are read, by several threads."""
        known = self._known_sides()
        asked = np.asarray(indices, dtype=np.int64)
        unknown = np.unique(asked[known[asked] == UNKNOWN])
        if len(unknown):
            if len(unknown) >= MANY:
                logger.info(f"reading the sizes of {len(unknown)} images of {printable(self.name)}")
            with ThreadPoolExecutor(READERS) as readers:
                parts = [unknown[first : first + PART] for first in range(0, len(unknown), PART)]
                known[unknown] = np.concatenate(list(readers.map(self._read_sides, parts)))
            self._keep_sides(known)
        return known[asked].astype(np.int64)

    def _read_sides(self, indices: np.ndarray) -> np.ndarray:
        sizes = [self._decoder.size(self.path(index)) for index in indices.tolist()]
        return np.array([0 if size is None else min(size) for size in sizes], dtype=np.int32)

    def _known_sides(self) -> np.ndarray:
        """One number per image; what could not be read at an earlier start is tried again."""
        known = np.full(len(self), UNKNOWN, dtype=np.int32)
        if self._index.folder is not None:
            try:
                kept = np.load(self._index.folder / SIDES, allow_pickle=False)
            except (OSError, ValueError, EOFError):  # none yet, or damaged
                return known
            if kept.shape == known.shape and kept.dtype == known.dtype:
                known = np.where(kept == 0, np.int32(UNKNOWN), kept)
        return known

    def _keep_sides(self, sides: np.ndarray) -> None:
        if self._index.folder is None:
            return
        beside = self._index.folder / f".{SIDES}.{secrets.token_hex(8)}"
        try:
            with beside.open("xb") as file:
                np.save(file, sides, allow_pickle=False)
            beside.replace(self._index.folder / SIDES)
        except OSError as error:  # the next start reads the headers again
            logger.info(f"the sizes of the images are not kept: {error.strerror}")
        finally:
            beside.unlink(missing_ok=True)
