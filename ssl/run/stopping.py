"""Stopping between two steps: a signal or the time limit asks, all processes agree.

SIGTERM, SIGINT and SIGUSR1 end the step in progress, which is then saved. A second signal ends the
process at once, even while its main thread waits for others inside torch, where Python runs no handler:
so a thread of its own listens.
"""

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from nestling.ssl.data.workers import STOP_SIGNALS
from nestling.ssl.distributed import is_distributed, largest

TIME_IS_UP = 75  # "temporary failure, try again" of sysexits.h: neither finished nor failed
# Who hands on what the process has got already, as one of a group: one request, not two.
REPEATERS = ("TORCHELASTIC_RUN_ID", "SLURM_STEP_ID")  # torchrun, srun
ECHO_SECONDS = 2.0  # of theirs
DOUBLED_SECONDS = 0.5  # of anyone else, such as `timeout`, who signals a process and then its group
AGREEMENT_SECONDS = 20.0  # torchrun kills 30 s after its signal


class Verdict(NamedTuple):
    """What all processes agreed on: whether any one's step is bad, and the exit code to stop with, or 0."""

    is_bad: bool
    code: int


class Stopping:
    """Whether this process was asked to stop, by a signal or because `max_hours` from now are over."""

    def __init__(self, max_hours: float | None = None) -> None:
        self._end = None if max_hours is None else time.monotonic() + 3600 * max_hours
        self._asked: float | None = None  # when
        self._code = 0
        self._agreed = False

    def agreed(self, is_bad: Tensor, is_finished: bool = False) -> Verdict:
        """What holds on any process; costs one wait for the device and, with others, one small message.

        Hours that are over stop no run that `is_finished`.

        Shape:
            is_bad: (), bool, on the device of the process
        """
        code = self._code
        if not code and not is_finished and self._end is not None and time.monotonic() >= self._end:
            code = TIME_IS_UP
        if is_distributed():
            flags = largest(torch.stack([is_bad.float(), torch.tensor(float(code)).to(is_bad.device)]))
            bad, together = flags.tolist()
            verdict = Verdict(bool(bad), int(together))
        else:
            verdict = Verdict(bool(is_bad), code)
        self._agreed = self._agreed or bool(verdict.code)
        return verdict

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals over, and give them back; where this is not the main thread, leave them alone."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        ear, mouth = socket.socketpair()
        mouth.setblocking(False)
        thread = threading.Thread(target=self._listen, args=(ear,), name="signals", daemon=True)
        thread.start()
        old_mouth = signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
        handlers = {number: signal.signal(number, _leave_to_the_thread) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            # The first that exits makes torchrun send SIGTERM to the others, who are on their way out.
            leaving = self._agreed and _launcher_kills()
            for number, handler in handlers.items():
                signal.signal(number, signal.SIG_IGN if leaving else handler)
            signal.set_wakeup_fd(old_mouth)
            mouth.close()
            thread.join()
            ear.close()

    def _listen(self, ear: socket.socket) -> None:
        """Read the numbers of signals as they come, until the other end closes."""
        while True:
            try:
                received = ear.recv(1)
            except TimeoutError:
                if not self._agreed:
                    _leave_at_once(self._code, "no agreement with the other processes")
                ear.settimeout(None)
                continue
            if not received:
                return
            self._receive(received[0])
            if self._asked is not None and not self._agreed and _launcher_kills():
                ear.settimeout(max(self._asked + AGREEMENT_SECONDS - time.monotonic(), 0.001))

    def _receive(self, number: int) -> None:
        if number not in STOP_SIGNALS:  # the death of a child, say
            return
        now = time.monotonic()
        if self._asked is None:
            self._asked, self._code = now, 128 + number
        elif now - self._asked > (ECHO_SECONDS if _launcher_repeats() else DOUBLED_SECONDS):
            _leave_at_once(128 + number, "a second signal")


def reason(code: int, max_hours: float | None) -> str:
    """Why a run stopped with that exit code."""
    if code == TIME_IS_UP:
        return f"train.max_hours={max_hours} are over"
    return f"{signal.Signals(code - 128).name} received"


def _leave_to_the_thread(number: int, frame: FrameType | None) -> None:
    """Python writes the signal's number for the thread before it calls this."""


def _launcher_repeats() -> bool:
    """Whether a launcher may hand on a signal that this process has got already."""
    return any(name in os.environ for name in REPEATERS)


def _launcher_kills() -> bool:
    """Whether a launcher is about to kill this process: torchrun does so after a while, a scheduler later."""
    return is_distributed() and "TORCHELASTIC_RUN_ID" in os.environ


def _leave_at_once(code: int, why: str) -> NoReturn:
    """End this process and its loaders from any thread, nothing saved."""
    for child in multiprocessing.active_children():
        child.kill()
    said = (
        f"ended at once ({why}): the step in progress is lost; resume=auto goes on from the last checkpoint"
    )
    os.write(2, f"{said}\n".encode())
    os._exit(code)
