"""Loader processes: how many, how they start, and what is said when one of them dies."""

import multiprocessing
import re
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker, util
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from nestling.ssl import allocator
from nestling.ssl.distributed import computes_on_cpu, is_distributed, processes_here, usable_cpus
from nestling.ssl.errors import UserError

Item = TypeVar("Item")

MAX_WORKERS = 8
STOP_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)]
NO_SHARED_MEMORY = (
    "shared memory (/dev/shm) is full: loader processes hand batches over there. Give it more (containers: "
    "--shm-size=8g), or lower data.num_workers or train.batch_size; data.num_workers=0 needs none"
)
KILLED = (
    "loader process{} was killed from outside or crashed{}; where memory ran out, lower data.num_workers, "
    "then start again (a pretraining with resume=auto)"
)
DEATH = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (.*)", re.DOTALL)


def default_workers(on_cpu: bool | None = None) -> int:
    """Loader processes per training process: the usable CPUs shared out but one, at most 8.

    Zero where the CPUs train as well: there, loaders take more from the steps than they save (two
    cores, the embedded tiles: 227 images/s without, 196 with one).
    """
    if computes_on_cpu() if on_cpu is None else on_cpu:
        return 0
    return min(max(usable_cpus() // processes_here() - 1, 0), MAX_WORKERS)


def loader_of(dataset: Dataset, keys: object, workers: int, start_method: str | None) -> DataLoader:
    """Each key (a list) makes one batch; the data set builds it whole, so nothing is collated."""
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=keys,  # type: ignore[arg-type]  # torch only iterates it
        collate_fn=_as_is,
        num_workers=workers,
        worker_init_fn=_start_worker,
        multiprocessing_context=(start_method or _safe_start()) if workers else None,
        pin_memory=torch.cuda.is_available() and not computes_on_cpu(),
        generator=torch.Generator(),  # else torch's own would move on with every iteration
    )


def _safe_start() -> str | None:
    """How loader processes start where nobody says: the platform's own way, None, if that is safe.

    Beside gloo's threads it is not: a child forked while one of them holds a lock of Python's hangs.
    """
    beside_threads = is_distributed() and computes_on_cpu()
    return (
        "forkserver" if beside_threads and "forkserver" in multiprocessing.get_all_start_methods() else None
    )


def started(loader: DataLoader[Item]) -> Iterator[Item]:
    """A data loader's iterator, whose processes never see the signals that ask a run to stop.

    A launcher or a terminal sends them to all, and the training process still needs batches to end its
    step. Children inherit what is blocked here, even those that start as new programs.
    """
    if loader.num_workers == 0 or not hasattr(signal, "pthread_sigmask"):
        return iter(loader)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        if (loader.multiprocessing_context or multiprocessing.get_context()).get_start_method() != "fork":
            resource_tracker.ensure_running()  # first, as Python lets signals through when it starts that
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        iterator = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    # At exit Python sends SIGTERM to its children and waits, for ever where one doesn't see it.
    util.Finalize(iterator, _kill, args=(iterator._workers,), exitpriority=1)  # type: ignore[attr-defined]
    return iterator


def following(iterator: Iterator[Item]) -> Item:
    """The next item of a data loader's iterator.

    Raises:
        UserError: the loader process that held it died.
    """
    with deaths_explained():
        try:
            return next(iterator)
        except (EOFError, ConnectionError, FileNotFoundError) as error:  # of the pipe that leads to it
            if not hasattr(iterator, "_shutdown_workers"):  # there is no such process
                raise
            raise UserError(KILLED.format("", "")) from error


def end(iterator: object) -> None:
    """End the processes of a data loader's iterator, by force where one is stuck: it ignores SIGTERM.

    After one has died, torch's handler of SIGCHLD raises again at every other that ends: not here.
    """
    shut_down = getattr(iterator, "_shutdown_workers", None)
    if shut_down is None:  # no processes
        return
    with _deaths_expected():
        shut_down()
        _kill(getattr(iterator, "_workers", ()))


def _kill(processes: Iterable[BaseProcess]) -> None:
    with _deaths_expected():
        for process in processes:
            process.kill()


@contextmanager
def _deaths_expected() -> Iterator[None]:
    """Without torch's handler of SIGCHLD, which raises."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL) if in_main_thread else None
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGCHLD, handler)


def room_for(shape: tuple[int, ...]) -> Tensor:
    """An empty uint8 tensor of that shape, in a loader process where the main one can read it.

    torch would move it there after the data set has returned, where a full shared memory hangs the run.

    Raises:
        UserError: there is no room.
    """
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    size = torch.Size(shape)
    try:
        storage = torch.UntypedStorage._new_shared(size.numel())
    except RuntimeError as error:
        raise UserError(NO_SHARED_MEMORY) from error
    contiguous = torch.empty(size, device="meta").stride()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, size, contiguous)


@contextmanager
def deaths_explained() -> Iterator[None]:
    """Say in one sentence that a loader process died; torch raises that in the middle of anything."""
    try:
        yield
    except RuntimeError as error:
        said = explained(error)
        if said is None:
            raise
        raise UserError(said) from error


def explained(error: BaseException) -> str | None:
    """What to say of the death of a loader process; None for any other error."""
    found = DEATH.search(str(error)) if isinstance(error, RuntimeError) else None
    if found is None:
        return None
    process, fate = found[1], found[2]
    if "Bus error" in fate:
        return f"loader process {process} died: {NO_SHARED_MEMORY}"
    sent = re.search(r"signal: ([\w ]+)", fate)
    return KILLED.format(f" {process}", f" ({sent[1].strip()})" if sent else "")


def _as_is(batch: Any) -> Any:
    return batch


def _start_worker(worker: int) -> None:
    allocator.as_usual()  # a fork has what its parent set; here a large image comes once and goes
    torch.set_num_threads(1)
