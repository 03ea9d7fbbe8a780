"""The index of a source in the cache: what a scan found, for as long as it is true.

An index lies in the folder `indexes/KEY.DIGEST` of the cache. The key says what was scanned and by
which rules, the digest what was found. So a later scan with another result leaves alone the arrays
that a run under way has mapped, and an index that isn't what its name says is known to be damaged.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from nestling.ssl.data.sources.cache import Remembered, cache_folder, recall

RULES = 2  # of scanning and of the arrays: another number makes every start scan again
UNUSED_SECONDS = 30 * 24 * 3600  # after which an index goes when its folder or list is scanned anew
RACY_NS = 2 * 10**9  # clocks of file systems are coarse: a folder can change twice at one time
WORD = 2**64


def key_of(place: str, *rules: str) -> str:
    """A name for what is scanned: an absolute path, and the rules by which."""
    parts = [os.fsencode(place), str(RULES).encode(), *(rule.encode() for rule in rules)]
    return hashlib.blake2b(b"\0".join(parts), digest_size=12).hexdigest()


def own_folders(cache: str | None) -> list[Path]:
    """Where the package itself writes, which a scan leaves out."""
    return [cache_folder(cache), _home(cache)]


def kept(cache: str | None, key: str) -> Iterator[Remembered]:
    """The sound indexes of a key, that used last first; damaged ones are deleted."""
    for folder in sorted(_folders(cache, key), key=_last_use, reverse=True):
        index = recall(folder)
        if index is not None and folder.name == _name(index, key):
            yield index
        elif os.access(folder, os.R_OK | os.X_OK):  # else it is another user's, and may be sound
            shutil.rmtree(folder, ignore_errors=True)


def keep(index: Remembered, cache: str | None, key: str) -> Remembered:
    """Put an index into the cache, or leave it in memory; those of its key that nobody used lately go."""
    for folder in _folders(cache, key) + _folders(cache, f".{key}"):  # the latter: left half-written
        if time.time() - _last_use(folder) > UNUSED_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)
    return index.keep(_home(cache) / _name(index, key))


def mark_used(index: Remembered) -> None:
    """Keep it from being deleted for another while."""
    if index.folder is not None:
        try:
            os.utime(index.folder)
        except OSError:  # another user's: they mark it themselves
            return


def stamp(status: os.stat_result) -> tuple[int, int, int]:
    """Device, number and time of change, by which a folder or file is known to be unchanged."""
    return status.st_dev % WORD, status.st_ino % WORD, status.st_mtime_ns % WORD


def is_settled(stamps: np.ndarray, began_ns: int) -> bool:
    """Whether all last changed so long before the scan began that a later change shows in the time.

    Shape:
        stamps: (N, 3) uint64
    """
    return bool((stamps[:, 2] < began_ns - RACY_NS).all())


def _home(cache: str | None) -> Path:
    return cache_folder(cache) / "indexes"


def _folders(cache: str | None, key: str) -> list[Path]:
    try:
        return [folder for folder in _home(cache).iterdir() if folder.name.startswith(f"{key}.")]
    except OSError:  # there is no cache yet, or none that we may read
        return []


def _last_use(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:  # just deleted by another process
        return 0.0


def _name(index: Remembered, key: str) -> str:
    digest = hashlib.blake2b(json.dumps(index.facts, sort_keys=True).encode(), digest_size=16)
    for name, array in sorted(index.arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)
    return f"{key}.{digest.hexdigest()}"
