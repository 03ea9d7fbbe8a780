"""Checkpoints written while training goes on: copied first, then saved by a thread, one at a time.

The thread only serialises and writes: it draws nothing and computes nothing, so training can't tell.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import TypeVar

from nestling.ssl.errors import UserError
from nestling.ssl.names import printable
from nestling.ssl.run import checkpoints, disk
from nestling.ssl.run.checkpoints import Checkpoint

logger = logging.getLogger("nestling")

SECONDS_BETWEEN_TRIES = 5.0  # while a full disk is waited for

Result = TypeVar("Result")


class CheckpointWriter:
    """Saves the checkpoints of the run directory `run`.

    `on_full_disk` is `stop` or `wait`. What goes wrong in the thread is raised by the next call.
    """

    def __init__(self, run: Path, keep_last: int, on_full_disk: str) -> None:
        self._run, self._keep_last, self._waits = run, keep_last, on_full_disk == "wait"
        self._thread: Thread | None = None
        self._error: Exception | None = None
        self._giving_up = Event()

    def write(self, checkpoint: Checkpoint, is_copy: bool = False) -> None:
        """Copy `checkpoint`, unless it is a copy, and begin to save it, once the one before is saved.

        Raises:
            UserError: the one before could not be saved.
        """
        self.wait()
        own = checkpoint if is_copy else checkpoint.copied()
        self._begin(lambda: self._save(own))

    def point_best_at(self, step: int, drops_old: bool = True) -> None:
        """Let `best` name the checkpoint of `step` as soon as that is saved; then the old best may go.

        Returns at once. Where the checkpoint can't be saved, `best` stays.
        """
        self._begin(lambda: self._point_best_at(step, drops_old))

    def wait(self) -> None:
        """Return when nothing is being saved any more.

        Raises:
            UserError: it could not be saved.
        """
        self._join()
        self.check()

    def check(self) -> None:
        """Return at once, whether or not something is being saved; after a failure, when it has ended.

        Raises:
            UserError: the last checkpoint could not be saved, or `best` not be moved to it.
        """
        if self._error is not None:
            self._join()  # what was to follow is left out, and must not take the error for none
            error, self._error = self._error, None
            raise error

    def give_up(self) -> None:
        """The end of a run that failed: finish what can be saved now, and only tell what can't."""
        self._giving_up.set()
        try:
            self.wait()
        except UserError as error:
            logger.error(str(error))

    def _begin(self, job: Callable[[], None]) -> None:
        """Do it in a thread, after what is being done; not where that failed."""
        before = self._thread

        def in_turn() -> None:
            """Wait for the job before; leave this out where that failed, else keep its error for `wait`."""
            if before is not None:
                before.join()
            if self._error is not None:
                return
            try:
                job()
            except Exception as error:
                self._error = error

        self._thread = Thread(target=in_turn, name="checkpoint")
        self._thread.start()

    def _join(self) -> None:
        if self._thread is not None:
            try:
                self._thread.join()
            except BaseException:  # Ctrl-C: else Python would wait for room before it exits
                self._giving_up.set()
                raise
            self._thread = None

    def _save(self, checkpoint: Checkpoint) -> None:
        what = f"the checkpoint of step {checkpoint.trainer['step']}", checkpoint.num_bytes()
        final = self._tried(*what, lambda: checkpoints.write(checkpoint, self._run))
        self._tried(*what, lambda: checkpoints.settle(self._run, final, self._keep_last, is_best=False))

    def _point_best_at(self, step: int, drops_old: bool) -> None:
        final = checkpoints.folder_of(self._run, step)
        what = "the pointer to the best checkpoint", len(final.name)
        self._tried(*what, lambda: checkpoints.point(self._run, checkpoints.BEST, final))
        if drops_old:
            self._tried(*what, lambda: checkpoints.rotate(self._run, self._keep_last))

    def _tried(self, what: str, num_bytes: int, action: Callable[[], Result]) -> Result:
        """Do it, where the disk is full again and again if so configured."""
        waited = False
        while True:
            try:
                result = action()
                break
            except Exception as error:
                number = disk.reason(error)
                if number is None:
                    raise
                told = self._told(what, num_bytes, number)
                if number not in disk.FULL or not self._waits or self._giving_up.is_set():
                    last = checkpoints.pointed(self._run, checkpoints.LAST)
                    kept = f"{last.name} is whole" if last is not None else "none was saved before"
                    raise UserError(f"{told}; {kept}. Make room, then go on with resume=auto") from error
            if not waited:
                logger.warning(f"{told}; training waits for room before the next one")
            waited = True
            self._giving_up.wait(SECONDS_BETWEEN_TRIES)
        if waited:
            logger.info(f"there is room again for {what}")
        return result

    def _told(self, what: str, num_bytes: int, number: int) -> str:
        needed, free = disk.size(num_bytes), disk.size(disk.free_bytes(self._run))
        return (
            f"{what} can't be written to out={printable(self._run)}: {os.strerror(number).lower()} "
            f"(it takes {needed}, {free} are free)"
        )


def saved_aside(checkpoint: Checkpoint, folder: Path) -> bool:
    """Save at once what no run goes on from, in a folder laid out as a run, where only the newest stays.

    Returns whether it could be written; why not is told.
    """
    try:
        checkpoints.save(checkpoint, folder, keep_last=1, is_best=False)
    except Exception as error:
        number = disk.reason(error)
        if number is None:
            raise
        logger.warning(f"{printable(folder)} can't be written: {os.strerror(number)}")
        return False
    return True
