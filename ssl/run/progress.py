"""What a person sees of a run: a bar on a terminal, plain lines elsewhere."""

import logging
import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

console = Console(highlight=False, soft_wrap=True)


class ConsoleHandler(logging.Handler):
    """Log lines of nestling, above the bar where there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line; warnings and worse are marked."""
        mark = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        console.print(f"{mark}{record.getMessage()}", markup=False)


def say_only_here(is_main: bool) -> None:
    """Let the main process speak, and it alone."""
    logger = logging.getLogger("nestling")
    logger.handlers = [ConsoleHandler()] if is_main else [logging.NullHandler()]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def duration(seconds: float) -> str:
    """As in 2:03:04."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


class RunProgress:
    """Step, loss, k-NN or RankMe, images/s and time left.

    Use as a context; `mode` is `auto`, `bar`, `plain` or `none`.
    """

    def __init__(self, mode: str, first_step: int, num_steps: int) -> None:
        self._plain = mode == "plain" or (mode == "auto" and not console.is_terminal)
        self._first, self._num_steps = first_step, num_steps
        self._start = time.perf_counter()
        self._judged = "k-NN –"
        self._bar = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
            console=console,
            disable=self._plain or mode == "none",
        )
        self._task = self._bar.add_task("", total=num_steps, completed=first_step, state="")

    def __enter__(self) -> "RunProgress":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def step(self, step: int) -> None:
        """Move the bar to `step` finished steps."""
        self._bar.update(self._task, completed=step)

    def knn(self, accuracy: float) -> None:
        """Show the newest k-NN accuracy, in [0, 1]."""
        self._judged = f"k-NN {accuracy:.1%}"

    def rankme(self, rank: float) -> None:
        """Show the newest effective rank of the features instead, where there is no k-NN."""
        self._judged = f"RankMe {rank:.1f}"

    def record(self, step: int, record: Mapping[str, float]) -> None:
        """Show what was logged at `step`."""
        state = f"loss {record['loss']:.4f}  {self._judged}  {record['images_per_second']:.0f} images/s"
        self._bar.update(self._task, state=state)
        if self._plain:
            left = (time.perf_counter() - self._start) / (step - self._first) * (self._num_steps - step)
            console.print(
                f"step {step}/{self._num_steps}  epoch {record['epoch']:.2f}  {state}  "
                f"lr {record['lr']:.2e}  left {duration(left)}"
            )
