"""The manifest of a checkpoint: size and SHA-256 of each file, so that damage is seen before it is loaded."""

import hashlib
import json
import os
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import Any

FILE = "manifest.json"
CHUNK = 2**20


def write(folder: Path) -> None:
    """Record every file of `folder`."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": digest(path)} for path in sorted(folder.iterdir())
    }
    (folder / FILE).write_text(json.dumps({"files": files}, indent=2) + "\n", encoding="utf-8")


def problem(folder: Path, names: Collection[str] | None = None) -> str | None:
    """What is wrong with the files of a checkpoint, None where they are as they were written.

    Only `names` are looked at where they are given; then a folder without a manifest, such as weights
    copied by hand, is taken as it is. Sizes come first, so that a short file costs no reading.
    """
    try:
        recorded: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))["files"]
        wanted = {name: recorded[name] for name in (recorded if names is None else names)}
        expected = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in wanted.items()}
    except FileNotFoundError:
        return None if names is not None else f"{FILE} is missing"
    except OSError as error:
        return f"{FILE} can't be read ({error.strerror})"
    except (ValueError, LookupError, TypeError):
        return f"{FILE} is damaged"
    try:
        return _first_difference(folder, expected)
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"{Path(error.filename or folder).name} can't be read ({error.strerror})"


def _first_difference(folder: Path, expected: dict[str, tuple[int, str]]) -> str | None:
    for name, (size, _) in expected.items():
        found = (folder / name).stat().st_size
        if found != size:
            return f"{name} has {found} bytes instead of {size}"
    for name, (_, sha256) in expected.items():
        if digest(folder / name) != sha256:
            return f"{name} is not what was written (its checksum differs)"
    return None


def digest(path: Path) -> str:
    """The SHA-256 of a file; one that did not change since is not read again."""
    facts = path.stat()
    return _digest(os.path.abspath(path), facts.st_size, facts.st_mtime_ns, facts.st_ino)


@lru_cache(maxsize=256)
def _digest(path: str, size: int, changed: int, inode: int) -> str:
    running = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            running.update(chunk)
    return running.hexdigest()
