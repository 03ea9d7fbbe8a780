"""log.jsonl: strict JSON, one line per logged step."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def strict(value: Any) -> Any:
    """Numbers that JSON does not know (NaN, infinities) become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class JsonLog:
    """Appends records and flushes each, so a killed run keeps what it said."""

    def __init__(self, path: Path, last_step: int | None = None) -> None:
        """Open for appending; lines after `last_step` belong to work that was lost, without it all do."""
        if path.exists():
            kept = [record for record in read(path) if last_step is not None and record["step"] <= last_step]
            draft = path.with_suffix(".writing")
            draft.write_text("".join(line(record) for record in kept), encoding="utf-8")
            os.replace(draft, path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Add one line."""
        self._file.write(line(record))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
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
