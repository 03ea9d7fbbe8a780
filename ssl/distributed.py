"""The other processes of a run, and the device this one computes on.

Without a process group every function here does nothing, so that callers need no special case.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from nestling.ssl.errors import UserError

Item = TypeVar("Item")

BEAT = timedelta(seconds=5)
SILENCE = timedelta(minutes=5)  # a launcher ends the others sooner; a slow disk or swap takes a while
LONGEST_PAUSE = 0.5  # seconds between two questions
_waits = count()

CPU_QUOTAS = (  # of a container, in microseconds per period: cgroup version 2 and 1
    "/sys/fs/cgroup/cpu.max",
    "/sys/fs/cgroup/cpu/cpu.cfs_quota_us /sys/fs/cgroup/cpu/cpu.cfs_period_us",
)


def is_distributed() -> bool:
    """Whether there are other processes to exchange with."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_main() -> bool:
    """Whether this is the only process or the first of several."""
    return not is_distributed() or dist.get_rank() == 0


def summed(tensor: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    if is_distributed():
        dist.all_reduce(tensor)
    return tensor


def largest(tensor: Tensor) -> Tensor:
    """The largest over all processes, element by element, in place."""
    if is_distributed():
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor


def average(tensors: list[Tensor]) -> None:
    """Replace each by its mean over all processes, with one message."""
    if not tensors or not is_distributed():
        return
    flat = summed(torch.cat([tensor.flatten() for tensor in tensors])) / dist.get_world_size()
    for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(mean.view_as(tensor))


def is_sharded(value: object) -> bool:
    """Whether a tensor lies in parts on several processes."""
    return hasattr(value, "to_local")  # torch's DTensor, whose module takes long to import


def local(tensor: Any) -> Tensor:
    """This process's part of a sharded tensor, in the same memory; any other tensor itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def everyones(items: list[Item]) -> list[Item]:
    """The items of all processes, those of the first one first; any that can be pickled."""
    if not is_distributed():
        return items
    gathered: list[list[Item]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, items)
    return [item for part in gathered for item in part]


@contextmanager
def failing_together() -> Iterator[None]:
    """Raise a UserError of one process, such as for an image it can't read, on all: none is left waiting."""
    problem: UserError | None = None
    try:
        yield
    except UserError as error:
        problem = error
    for other in everyones([] if problem is None else [problem]):
        raise other


@contextmanager
def patiently() -> Iterator[None]:
    """Let the others wait for what the main process does inside, longer than a collective would.

    They ask the store that the processes met at, where the main one says that it is done, and until then
    every few seconds that it is alive.

    Raises:
        RuntimeError: the main process is gone, or has said nothing for `SILENCE`: not for `failing_together`,
            which would wait for it.
    """
    if not is_distributed():
        yield
        return
    store = dist.distributed_c10d._get_default_store()
    key = f"nestling/patience/{next(_waits)}"  # all processes count alike
    if not is_main():
        yield
        _wait_for(store, key)
        return
    done = Event()
    pulse = Thread(target=_beat, args=(store, key, done), name="alive", daemon=True)
    pulse.start()
    try:
        yield
    finally:
        done.set()
        pulse.join()


def _beat(store: dist.Store, key: str, done: Event) -> None:
    """Say again and again that the main process is alive, and at last that it is done."""
    while not done.wait(BEAT.total_seconds()):
        store.add(f"{key}/beats", 1)
    store.set(key, "done")


def _wait_for(store: dist.Store, key: str) -> None:
    pause, beats, heard = 0.001, 0, time.monotonic()
    while not store.check([key]):
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
        counted = store.add(f"{key}/beats", 0)
        if counted > beats:
            beats, heard = counted, time.monotonic()
        if time.monotonic() - heard > SILENCE.total_seconds():
            raise RuntimeError(f"the main process has given no sign of life for {SILENCE}")


def num_processes() -> int:
    """All processes, on all machines."""
    return dist.get_world_size() if is_distributed() else 1


def processes_here() -> int:
    """Training processes on this machine, as the launcher says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def usable_cpus() -> int:
    """CPUs that this process may use: those it is bound to, at most what its container's quota allows."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for files in CPU_QUOTAS:
        try:
            quota, period = " ".join(Path(file).read_text() for file in files.split()).split()
        except (OSError, ValueError):
            continue
        if quota.isdigit():  # else "max" or -1: no limit
            return max(1, min(bound, int(quota) // int(period)))
    return bound


def computes_on_cpu() -> bool:
    """Whether this process leaves accelerators alone: there is none, or the launcher said so.

    accelerate's launchers hand their choice on by this variable.
    """
    return os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes") or not (
        torch.accelerator.is_available()
    )


def cpu_multiplies_bf16() -> bool:
    """Whether this CPU has units for bf16, as torch can tell."""
    tell = getattr(torch.cpu, "get_capabilities", None)  # which older torch lacks
    capabilities = tell() if tell else {}
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))
