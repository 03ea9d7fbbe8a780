"""The unreadable images of a run: each named once, counted, and too many refused."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from nestling.ssl.data.failures import Failure
from nestling.ssl.distributed import everyones, is_main
from nestling.ssl.errors import UserError
from nestling.ssl.names import printable
from nestling.ssl.run import log

logger = logging.getLogger("nestling")

FILE = "unreadable.jsonl"


class Ledger:
    """Knows, alike on all processes, which of a run's `num_images` images couldn't be read.

    Training and evaluation share one, so that a path is warned of once. With a folder, the main process
    also keeps paths and reasons in `unreadable.jsonl` there, each once however often a run is resumed.
    `key` is what the user sets `max_share` by.
    """

    def __init__(self, max_share: float, num_images: int, key: str = "data.max_bad_share") -> None:
        self.max_share, self.num_images, self.key = max_share, num_images, key
        self._named: dict[str, str] = {}
        self._file: Path | None = None
        self._written: set[str] = set()

    def keep_in(self, folder: Path) -> None:
        """Write `unreadable.jsonl` there from now on, what is known already included."""
        if is_main():
            self._file = folder / FILE
            self._written = set(unreadable(self._file))
            self._write(self._named)

    def exchange(self, failures: Sequence[Failure], replaced: int = 0) -> int:
        """Tell all processes what this one met; all must call it.

        Returns the sum of `replaced` over all processes.

        Raises:
            UserError: more than `max_share` of the images are unreadable.
        """
        told = everyones([(list(failures), replaced)])
        met = [failure for part, _ in told for failure in part]
        fresh = {failure.path: failure.reason for failure in met if failure.path not in self._named}
        for path, reason in fresh.items():
            logger.warning(f"left out {printable(path)}: {reason}")
        self._named.update(fresh)
        self._write(fresh)
        self.refuse_above(len(self._named))
        return sum(count for _, count in told)

    def refuse_above(self, unreadable_images: int, such_as: str = "") -> None:
        """Raise UserError where that many of the images are more than may be unreadable."""
        if unreadable_images > self.max_share * self.num_images:
            raise UserError(
                f"{unreadable_images} of {self.num_images} images can't be read{such_as}, more than "
                f"{self.key}={self.max_share} allows; repair or remove them, or raise it (up to 0.5)"
            )

    def paths(self) -> list[str]:
        """All that couldn't be read, in the order they were met."""
        return list(self._named)

    def _write(self, reasons: Mapping[str, str]) -> None:
        fresh = {path: reason for path, reason in reasons.items() if path not in self._written}
        if self._file is None or not fresh:
            return
        with self._file.open("a", encoding="utf-8") as file:
            file.writelines(log.line({"path": path, "reason": reason}) for path, reason in fresh.items())
        self._written.update(fresh)


def unreadable(file: Path) -> dict[str, str]:
    """Path to reason of what a run left out, from its `unreadable.jsonl`; names come back byte by byte."""
    return {record["path"]: record["reason"] for record in log.read(file)} if file.exists() else {}
