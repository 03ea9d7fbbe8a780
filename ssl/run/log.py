"""log.jsonl: strict JSON, one line per logged step."""

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nestling.ssl.errors import UserError
from nestling.ssl.names import printable
from nestling.ssl.run import disk

logger = logging.getLogger("nestling")


def strict(value: Any) -> Any:
    """Numbers that JSON does not know (NaN, infinities) become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class JsonLog:
    """Appends records and flushes each, so a killed run keeps what it said.

    On a full disk the records wait in memory: whether the run ends is for its checkpoints to say.
    """

    def __init__(self, path: Path, last_step: int | None = None) -> None:
        """Open for appending; lines after `last_step` belong to work that was lost, without it all do."""
        if path.exists():
            kept = [record for record in read(path) if last_step is not None and record["step"] <= last_step]
            with disk.replaced(path) as draft:
                draft.write_text("".join(line(record) for record in kept), encoding="utf-8")
        self._path, self._file = path, path.open("ab", buffering=0)
        self._pending = bytearray()
        self._whole: bytes | None = None  # all the lines, where one that was completed waits for room

    def write(self, record: Mapping[str, Any]) -> None:
        """Add one line."""
        if self._whole is not None:
            self._whole += line(record).encode()
            self._replace(is_told=True)
            return
        waiting = bool(self._pending)
        self._pending += line(record).encode()
        try:
            while self._pending:
                del self._pending[: self._file.write(self._pending)]
        except OSError as error:
            if error.errno not in disk.FULL:
                raise
            if not waiting:
                self._tell(error.errno)

    def complete(self, record: Mapping[str, Any]) -> None:
        """Put `record` in the place of the last line: a kill at any instant leaves the one or the other."""
        waiting = bool(self._pending) or self._whole is not None
        content = self._path.read_bytes() + self._pending if self._whole is None else self._whole
        self._whole = content[: content.rfind(b"\n", 0, -1) + 1] + line(record).encode()
        self._pending.clear()
        self._replace(is_told=waiting)

    def _replace(self, is_told: bool) -> None:
        """Let the file hold the whole; on a full disk it stays as it is."""
        assert self._whole is not None
        self._file.close()  # Windows replaces no open file
        try:
            with disk.replaced(self._path) as draft:
                draft.write_bytes(self._whole)
            self._whole = None
        except UserError as error:
            number = disk.reason(error)
            if number not in disk.FULL:
                raise
            if not is_told:
                self._tell(number or 0)
        finally:
            self._file = self._path.open("ab", buffering=0)

    def _tell(self, number: int) -> None:
        logger.warning(f"{printable(self._file.name)} waits for room: {os.strerror(number)}")

    def close(self) -> None:
        """Close the file."""
        lines = self._pending.count(b"\n")
        if self._whole is not None:
            lines = len({*self._whole.splitlines()} - {*self._path.read_bytes().splitlines()})
        if lines:
            logger.warning(f"{printable(self._file.name)} lacks its last lines ({lines}): there was no room")
        self._file.close()


def line(record: Mapping[str, Any]) -> str:
    """One record as one line of strict JSON."""
    return json.dumps({key: strict(value) for key, value in record.items()}, allow_nan=False) + "\n"


def read(path: Path) -> list[dict[str, Any]]:
    """All complete records of a log; a line cut short by a kill is left out."""
    records = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return records
