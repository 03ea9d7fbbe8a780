"""Shorter sides of images, kept beside an index in the cache: reading a million headers takes minutes."""

import logging
import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np

from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.sources.cache import Remembered
from nestling.ssl.data.sources.index import RACY_NS
from nestling.ssl.names import printable

logger = logging.getLogger("nestling")

FILES = np.dtype([("side", np.int32), ("bytes", np.int64), ("changed", np.int64)])  # of a file when read
READERS = 8  # threads that read headers: mostly they wait for the disk
MANY = 5000  # headers whose reading is worth a word: a second or more
PART = 256  # images that a thread takes at a time
NOTHING = np.array(
    (0, -1, -1), dtype=FILES
)  # of a file that is not known, or could not be read: no file is like that


class FileSides:
    """The shorter sides of numbered files; a header is read where the size or time of its file is new.

    Arrays in files show other sides where other channels are asked for, so each decoder has its own.
    """

    def __init__(self, name: str, path: Callable[[int], str], decoder: Decoder, index: Remembered) -> None:
        self._name, self._path, self._decoder, self._index = name, path, decoder, index

    def of(self, indices: np.ndarray, num_images: int) -> np.ndarray:
        """Of those images, 0 where unreadable; what could not be read at an earlier start is tried again.

        Shape:
            indices: (n,) -> (n,) int64
        """
        known = recalled(self._index, self._decoder, FILES, num_images)
        if known is None:
            known = np.full(num_images, NOTHING)
        asked, place = np.unique(np.asarray(indices, dtype=np.int64), return_inverse=True)
        unread = int((known["bytes"][asked] < 0).sum())
        if unread >= MANY:
            logger.info(f"reading the sizes of {unread} images of {printable(self._name)}")
        parts = [(part, known[part]) for part in np.split(asked, range(PART, len(asked), PART))]
        with ThreadPoolExecutor(READERS) as readers:
            found = np.concatenate([*readers.map(self._looked_at, parts), np.empty(0, FILES)])
        sides = found["side"][place].astype(np.int64)
        found[(found["side"] == 0) | (found["changed"] >= time.time_ns() - RACY_NS)] = NOTHING
        if not np.array_equal(found, known[asked]):
            known[asked] = found
            remember(self._index, self._decoder, known)
        return sides

    def _looked_at(self, part: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        """What is true of the files now.

        Shape:
            part: (n,) indices, (n,) FILES as known -> (n,) FILES
        """
        indices, known = part
        found = known.copy()
        for place, (index, old) in enumerate(zip(indices.tolist(), known.tolist(), strict=True)):
            path = self._path(index)
            try:
                status = os.stat(path)
            except (OSError, ValueError):  # ValueError: a name that holds a zero byte
                found[place] = NOTHING
                continue
            if old[1:] != (status.st_size, status.st_mtime_ns):
                size = self._decoder.size(path)
                found[place] = (0 if size is None else min(size), status.st_size, status.st_mtime_ns)
        return found


def recalled(index: Remembered, decoder: Decoder, kind: np.dtype, num_images: int) -> np.ndarray | None:
    """What was kept beside an index for images read as that decoder does; None where that is nothing."""
    if index.folder is None:
        return None
    try:
        kept: np.ndarray = np.load(index.folder / _file(decoder), allow_pickle=False)
    except (OSError, ValueError, EOFError):  # none yet, or damaged
        return None
    return kept if kept.shape == (num_images,) and kept.dtype == kind else None


def remember(index: Remembered, decoder: Decoder, sides: np.ndarray) -> None:
    """Keep them beside the index, whole or not at all."""
    if index.folder is None:
        return
    file = _file(decoder)
    beside = index.folder / f".{file}.{secrets.token_hex(8)}"
    try:
        with beside.open("xb") as stream:
            np.save(stream, sides, allow_pickle=False)
        beside.replace(index.folder / file)
    except OSError as error:  # the next start reads the headers again
        logger.info(f"the sizes of the images are not kept: {error.strerror}")
        with suppress(OSError):
            beside.unlink(missing_ok=True)


def _file(decoder: Decoder) -> str:
    return f"sides-{decoder.mode}-{decoder.channels}.npy"
