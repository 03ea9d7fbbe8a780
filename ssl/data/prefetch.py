"""The next batch on its way to a GPU while that computes: one ahead, on a stream of its own.

Where no GPU trains, nothing is taken before it is asked for.
"""

import time
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from nestling.ssl.data.loader import Batch


class Transfer(Protocol):
    """How a batch reaches the device, and whether that has anything to do meanwhile."""

    def begin(self, batch: Batch) -> Batch:
        """The batch to be on the device, which nobody may read yet."""

    def finish(self, batch: Batch) -> None:
        """From here on the device may read what `begin` returned last."""

    def mark(self) -> None:
        """Remember the work that the device was given up to now."""

    def idle(self) -> float:
        """Seconds since that work was done; 0 as long as it isn't."""


class Prefetched(Iterator[Batch]):
    """The batches of a loader, of which `fetch` may take the next early.

    What goes wrong with that batch, and that there is none, is told by `next`, where it would be used. One
    that was fetched and never used is lost, so counts belong to whoever uses batches.

    Args:
        transfer: None where batches stay where they are; then `fetch` does nothing.
    """

    def __init__(self, batches: Iterator[Batch], transfer: Transfer | None) -> None:
        self._batches, self._transfer = batches, transfer
        self._fetched: Batch | Exception | None = None

    def __next__(self) -> Batch:
        if self._transfer is None:
            return next(self._batches)
        if self._fetched is None:
            self._take(self._transfer)
        fetched, self._fetched = self._fetched, None
        if isinstance(fetched, Exception):
            raise fetched
        assert fetched is not None
        self._transfer.finish(fetched)
        return fetched

    def fetch(self) -> float:
        """Take the next batch while the device is at work; the seconds for which it had to wait.

        Call it when all work on the batch before has been given to the device.
        """
        if self._transfer is None or self._fetched is not None:
            return 0.0
        start = time.perf_counter()
        self._transfer.mark()
        self._take(self._transfer)
        return min(self._transfer.idle(), time.perf_counter() - start)

    def _take(self, transfer: Transfer) -> None:
        try:
            self._fetched = transfer.begin(next(self._batches))
        except Exception as error:  # for the step that it belongs to
            self._fetched = error


class ToCuda:
    """Copies from pinned memory on a stream beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._arrived = torch.cuda.Event()
        self._worked = torch.cuda.Event(enable_timing=True)

    def begin(self, batch: Batch) -> Batch:
        """The host goes on at once; torch keeps pinned memory until its copy is done."""
        with torch.cuda.stream(self._stream):
            moved = batch.to(self._device)
            self._arrived.record(self._stream)
        return moved

    def finish(self, batch: Batch) -> None:
        """The computing stream waits, not the host."""
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(self._arrived)
        for tensor in tensors_of(batch):
            tensor.record_stream(computing)  # else the next copy could take its memory while it is read

    def mark(self) -> None:
        """On the computing stream."""
        self._worked.record(torch.cuda.current_stream(self._device))

    def idle(self) -> float:
        """By the clock of the GPU, as it may have come to its end at any time before."""
        if not self._worked.query():
            return 0.0
        now = torch.cuda.Event(enable_timing=True)
        now.record(self._stream)
        now.synchronize()  # behind nothing but the copy of one batch
        return self._worked.elapsed_time(now) / 1000


def tensors_of(batch: Batch) -> Iterator[Tensor]:
    """All of a batch that travels to the device."""
    yield from batch.views
    for colors in batch.colors or ():
        yield from (colors.views, colors.numbers)


def prefetched(batches: Iterator[Batch], device: torch.device) -> Prefetched:
    """Batches for `device`, of which a GPU can be given one ahead."""
    return Prefetched(batches, ToCuda(device) if device.type == "cuda" else None)
