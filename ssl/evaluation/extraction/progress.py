"""How far an extraction is: a bar on a terminal, plain lines elsewhere."""

import time
from types import TracebackType

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from nestling.ssl.run.progress import console, duration

SECONDS_BETWEEN_LINES = 10.0


class ExtractionProgress:
    """Images done of `total`, images/s and time left, as the process sees it that does one in `processes`.

    Use as a context; `mode` is `auto`, `bar`, `plain` or `none`.
    """

    def __init__(self, mode: str, total: int, done: int, processes: int) -> None:
        self._plain = mode == "plain" or (mode == "auto" and not console.is_terminal)
        self._total, self._before, self._here, self._processes = total, done, 0, processes
        self._start = self._said = time.perf_counter()
        self._bar = Progress(
            TextColumn("image {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(),
            TextColumn("{task.fields[rate]:.0f} images/s"),
            TimeRemainingColumn(),
            console=console,
            disable=self._plain or mode == "none",
        )
        self._task = self._bar.add_task("", total=total, completed=done, rate=0.0)

    def __enter__(self) -> "ExtractionProgress":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._here and error is None:
            self._line(last=True)
        self._bar.stop()

    def add(self, images: int) -> None:
        """This process has done so many more."""
        self._here += images
        self._bar.update(self._task, completed=self._done(), rate=self._rate())
        if time.perf_counter() - self._said >= SECONDS_BETWEEN_LINES:
            self._line()

    def _done(self) -> int:
        return min(self._total, self._before + self._here * self._processes)

    def _rate(self) -> float:
        elapsed = time.perf_counter() - self._start
        return (self._done() - self._before) / max(elapsed, 1e-9)

    def _line(self, last: bool = False) -> None:
        self._said = time.perf_counter()
        done = self._total if last else self._done()
        if self._plain:
            left = (self._total - done) / max(self._rate(), 1e-9)
            console.print(f"image {done}/{self._total}  {self._rate():.0f} images/s  left {duration(left)}")
