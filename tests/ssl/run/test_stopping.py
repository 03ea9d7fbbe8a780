"""Signals and the time limit, as this process and small ones of its own receive them."""

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch

from nestling.ssl.data.workers import STOP_SIGNALS
from nestling.ssl.run import stopping
from nestling.ssl.run.stopping import Stopping, reason

FINE, BAD = torch.tensor(False), torch.tensor(True)


def code_within(asked: Stopping, seconds: float = 5.0) -> int:
    """The exit code that is asked for, once it is: the thread that listens takes a moment."""
    end = time.monotonic() + seconds
    while not asked.agreed(FINE).code and time.monotonic() < end:
        time.sleep(0.01)
    return asked.agreed(FINE).code


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 128 + signal.SIGUSR1)]
)
def test_a_signal_asks_with_a_code_of_its_own_and_the_step_goes_on(number, code, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "torchrun's")
    asked = Stopping()
    with asked.listening():
        os.kill(os.getpid(), number)
        assert code_within(asked) == code
        time.sleep(0.2)
        os.kill(os.getpid(), number)  # the launcher hands on what its group has got: no second request
        time.sleep(0.1)
    assert reason(code, None) == f"{number.name} received"


def test_handlers_and_threads_are_put_back():
    handlers, threads = [signal.getsignal(number) for number in STOP_SIGNALS], threading.active_count()
    with Stopping().listening():
        assert [signal.getsignal(number) for number in STOP_SIGNALS] != handlers
        assert threading.active_count() == threads + 1
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == handlers
    assert threading.active_count() == threads
    assert signal.set_wakeup_fd(-1) == -1


def test_they_are_put_back_after_an_error_too():
    handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
    with pytest.raises(ZeroDivisionError), Stopping().listening():
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == handlers


def test_outside_the_main_thread_signals_are_left_alone():
    handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
    seen: list[list[object]] = []

    def listen() -> None:
        with Stopping().listening():
            seen.append([signal.getsignal(number) for number in STOP_SIGNALS])

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert seen == [handlers]


def test_hours_that_are_over_ask_too():
    assert Stopping(max_hours=0).agreed(FINE) == (False, stopping.TIME_IS_UP)
    assert Stopping(max_hours=0).agreed(FINE, is_finished=True) == (False, 0)
    asked = Stopping(max_hours=0.1 / 3600)
    assert asked.agreed(FINE) == (False, 0)
    time.sleep(0.15)
    assert asked.agreed(FINE) == (False, 75)
    assert reason(75, 0.5) == "train.max_hours=0.5 are over"


def test_a_signal_counts_before_the_hours():
    asked = Stopping(max_hours=0)
    with asked.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        end = time.monotonic() + 5
        while asked.agreed(FINE).code == 75 and time.monotonic() < end:
            time.sleep(0.01)
    assert asked.agreed(FINE).code == 143


def test_a_bad_step_is_told_beside():
    assert Stopping().agreed(BAD) == (True, 0)


# A process that is stuck where Python runs no handler, with a loader process of its own.
STUCK = """
import ctypes, sys
from torch.utils.data import DataLoader
from nestling.ssl.data.workers import loader_of, started
from nestling.ssl.run import stopping
with stopping.Stopping().listening():
    iterator = started(loader_of([0] * 9, list(range(9)), 1, "fork"))
    next(iterator)
    print(iterator._workers[0].pid, flush=True)
    ctypes.CDLL(None).sleep(60)
    ctypes.CDLL(None).sleep(60)
"""


def is_alive(pid: int) -> bool:
    """Not ended; one that has ended may stay known until someone asks for its code."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_a_second_signal_ends_a_stuck_process_and_its_loaders_at_once():
    with subprocess.Popen(
        [sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        worker = int(process.stdout.readline())
        os.kill(worker, signal.SIGTERM)  # loaders never see it
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)  # as `timeout` does, to the process and to its group
        time.sleep(0.8)
        assert process.poll() is None
        assert is_alive(worker)
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        assert time.monotonic() - start < 5
        assert process.stderr.read().startswith("ended at once (a second signal)")
        time.sleep(0.2)
        assert not is_alive(worker)
