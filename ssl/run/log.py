"""log.jsonl: strict JSON, one line per logged step."""

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
        self._file = path.open("ab", buffering=0)
        self._pending = bytearray()

    def write(self, record: Mapping[str, Any]) -> None:
        """Add one line."""
        waiting = bool(self._pending)
        self._pending += line(record).encode()
        try:
            while self._pending:
                del self._pending[: self._file.write(self._pending)]
        except OSError as error:
            if error.errno not in disk.FULL:
                raise
            if not waiting:
                logger.warning(f"{printable(self._file.name)} waits for room: {error.strerror}")

    def close(self) -> None:
        """Close the file."""
        if self._pending:
            lines = self._pending.count(b"\n")
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
