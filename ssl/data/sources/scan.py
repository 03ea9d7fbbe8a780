"""From a folder to its index, and whether the index still says what is there."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from nestling.ssl.data.sources.cache import Remembered
from nestling.ssl.data.sources.index import is_settled, stamp
from nestling.ssl.data.sources.packed import END, NO_FOLDER
from nestling.ssl.data.sources.walk import ScanError, Walk, within
from nestling.ssl.run.marks import is_run


def scan(root: str, extensions: frozenset[str], own: Iterable[Path] = ()) -> Remembered:
    """The index of a folder: what a `FileSource` needs, and what tells whether it is still true.

    Where the folders in `own` lie below the root, they are left out without a word.

    Raises:
        ScanError: it can't be read, holds no image, or is the folder of a run.
    """
    began = time.time_ns()
    walk = Walk(root, extensions, own)
    packer = walk.packed()
    if not len(packer):
        looked_for = " ".join(sorted(extensions))
        seen = walk.passed_over(", e.g.") or "no file at all"
        raise ScanError(f": no images; looked for {looked_for} at any depth and saw {seen}")
    arrays = packer.arrays()
    labels, class_names = _labels(arrays["folder_of"], list(packer.folders))
    if labels is not None:
        arrays["labels"] = labels
    arrays["visited"] = np.frombuffer(walk.visited, dtype=np.uint8)
    arrays["stamps"] = np.frombuffer(walk.stamps, dtype=np.uint64).reshape(-1, 3)
    facts = {
        "class_names": class_names,
        "passed_over": walk.passed_over(),
        "broken": [os.fsdecode(link) for link in walk.broken + walk.unreachable],
        "closed": [os.fsdecode(folder) for folder in walk.closed],
        "runs": [os.fsdecode(run) for run in walk.runs],
        "settled": is_settled(arrays["stamps"], began),
    }
    return Remembered(arrays, facts)


def is_current(index: Remembered, root: str) -> bool:
    """Whether a scan would find the same: a file added, removed or renamed shows in its folder's time."""
    if not index.facts["settled"]:
        return False
    visited = index.arrays["visited"].tobytes().split(END)[:-1]
    stamps = index.arrays["stamps"].tolist()
    try:
        same = all(
            stamp(os.stat(within(root, folder))) == tuple(expected)
            for folder, expected in zip(visited, stamps, strict=True)
        )
    except OSError:
        return False
    broken = not any(os.path.exists(os.path.join(root, link)) for link in index.facts["broken"])
    closed = not any(_opens(os.path.join(root, folder)) for folder in index.facts["closed"])
    return same and broken and closed and all(is_run(Path(root, run)) for run in index.facts["runs"])


def _opens(folder: str) -> bool:
    """Permissions may change without a trace in the time of any folder."""
    try:
        with os.scandir(folder):
            return True
    except OSError:
        return False


def _labels(folder_of: np.ndarray, folders: list[bytes]) -> tuple[np.ndarray | None, list[str] | None]:
    """One label per image by its first-level folder, or None where that makes no classes.

    Shape:
        folder_of: (N,) -> (N,) int64
    """
    firsts = [folder.split(b"/", 1)[0] for folder in folders]
    names = sorted(set(firsts))
    if len(names) < 2 or (folder_of == NO_FOLDER).any():
        return None, None
    number = {name: label for label, name in enumerate(names)}
    labels = np.array([number[first] for first in firsts], dtype=np.int64)
    return labels[folder_of], [os.fsdecode(name) for name in names]
