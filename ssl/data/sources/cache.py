"""What a scan found, kept for the next start: arrays that are mapped into memory, and a few plain facts."""

import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from nestling.ssl.errors import UserError
from nestling.ssl.names import printable

logger = logging.getLogger("nestling")

FACTS = "facts.json"


def cache_folder(cache: str | None) -> Path:
    """`data.cache`, or where it is null, nestling in the user's cache folder."""
    if cache is not None:
        return Path(cache).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nestling"


class Remembered:
    """Arrays and facts in a folder of the cache; pickled as the folder's name.

    Where the cache can't be written they live in memory, and a process that is spawned gets a copy.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> None:
        self._content: tuple[dict[str, np.ndarray], dict[str, Any]] | None = (dict(arrays), dict(facts))
        self.folder: Path | None = None

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """By name; where it was pickled, they are mapped when first asked for.

        Raises:
            UserError: they were removed since.
        """
        return self._opened()[0]

    @property
    def facts(self) -> dict[str, Any]:
        """Plain values by name; raises as `arrays`."""
        return self._opened()[1]

    def _opened(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        if self._content is None:
            assert self.folder is not None
            again = recall(self.folder)
            if again is None:
                raise UserError(
                    f"{printable(self.folder)} was removed or damaged while a run used it; start the run "
                    "again, which scans the images anew, and leave data.cache alone while it runs"
                )
            self._content = again._content
        assert self._content is not None
        return self._content

    def keep(self, folder: Path) -> "Remembered":
        """Write it whole or not at all; returns what is read back, or itself if it can't be."""
        beside = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
        try:
            beside.mkdir(parents=True)
            for name, array in self.arrays.items():
                with _written(beside / f"{name}.npy") as file:
                    np.save(file, array, allow_pickle=False)
            with _written(beside / FACTS) as file:
                file.write(json.dumps({"arrays": sorted(self.arrays), "facts": self.facts}).encode())
            if recall(folder) is None:  # else another process was as quick
                shutil.rmtree(folder, ignore_errors=True)  # damaged, where it is there at all
                beside.replace(folder)
        except OSError as error:
            if recall(folder) is None:
                logger.warning(
                    f"what was scanned can't be kept in {printable(folder)}: {error.strerror}; the next "
                    "start scans again, unless data.cache names a folder that can be written"
                )
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        return recall(folder) or self

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "_content": self._content if self.folder is None else None}


@contextmanager
def _written(path: Path) -> Iterator[BinaryIO]:
    """A new file that is on the disk before the folder gets its name."""
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def recall(folder: Path) -> Remembered | None:
    """What an earlier start kept there, its arrays mapped; None where that is nothing, or damaged."""
    try:
        kept = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        arrays = {name: _mapped(folder / f"{name}.npy") for name in kept["arrays"]}
        found = Remembered(arrays, kept["facts"])
    except (OSError, EOFError, ValueError, LookupError, TypeError):
        return None
    found.folder = folder.absolute()
    return found


def _mapped(file: Path) -> np.ndarray:
    """One array; an empty one can't be mapped."""
    try:
        return np.load(file, mmap_mode="r", allow_pickle=False)
    except ValueError:
        return np.load(file, allow_pickle=False)
