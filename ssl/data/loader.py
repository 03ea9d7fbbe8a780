"""Batches of views for training and of images for evaluation.

Shapes used below: B images, n local views, S and s the sides of global and local views.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from nestling.ssl.config import Config
from nestling.ssl.data.order import SampleRef, StepSampler, steps_per_epoch
from nestling.ssl.data.sources import ImageSource
from nestling.ssl.distributed import computes_on_cpu
from nestling.ssl.errors import UserError
from nestling.ssl.randomness import Stream, generator
from nestling.ssl.views.evaluation import eval_view
from nestling.ssl.views.plan import NUM_GLOBAL, draw, sizes_at
from nestling.ssl.views.render import render

__all__ = ["Batch", "EvalLoader", "TrainLoader", "default_workers", "steps_per_epoch"]

MAX_WORKERS = 8


@dataclass
class Batch:
    """The views of a micro-batch, grouped by size: global, then local where there are any.

    Shape:
        views[0]: (2 B, 3, S, S) uint8, the first view of all images, then the second
        views[1]: (n B, 3, s, s) uint8, likewise
        indices: (B,) int64
    """

    views: list[Tensor]
    indices: Tensor
    step: int

    def pin_memory(self) -> "Batch":
        """Called by the data loader where batches go to a GPU."""
        return Batch([view.pin_memory() for view in self.views], self.indices.pin_memory(), self.step)


class _TrainBatches(Dataset[Batch | UserError]):
    """References of a micro-batch -> its views: a pure function, whichever process runs it."""

    def __init__(self, source: ImageSource, cfg: Config) -> None:
        self.source, self.views, self.seed = source, cfg.views, cfg.seed

    def __getitem__(self, refs: list[SampleRef]) -> Batch | UserError:
        sizes = sizes_at(self.views, self.seed, refs[0].step)
        counts = (NUM_GLOBAL, self.views.num_local)
        groups = [
            torch.empty((count, len(refs), 3, size, size), dtype=torch.uint8)
            for count, size in zip(counts, sizes, strict=True)
            if count
        ]
        out = [view for group in groups for view in group.numpy()]
        try:
            for place, ref in enumerate(refs):
                image = self.source.load(ref.image)
                random = generator(self.seed, Stream.VIEWS, ref.epoch, ref.image)
                for into, view in zip(
                    out, draw(random, image.shape[0], image.shape[1], self.views, *sizes), strict=True
                ):
                    into[place] = render(view, image)
        except UserError as error:  # returned, as an exception would come back wrapped in a traceback
            return error
        indices = torch.tensor([ref.image for ref in refs])
        return Batch([group.flatten(0, 1) for group in groups], indices, refs[0].step)


class TrainLoader:
    """All micro-batches of one process, from `start_step` to the end of training.

    The loader processes live as long as the iteration; `close` ends them, as does leaving a `with`.

    Raises:
        UserError: the images don't fill one step; while iterating: an image can't be read.
    """

    def __init__(
        self,
        source: ImageSource,
        cfg: Config,
        total_steps: int,
        process: int,
        num_processes: int,
        start_step: int = 0,
    ) -> None:
        self.sampler = StepSampler(len(source), cfg, total_steps, process, num_processes, start_step)
        workers = default_workers() if cfg.data.num_workers is None else cfg.data.num_workers
        batches = _TrainBatches(source, cfg)
        self._loader = _loader(batches, self.sampler, workers, cfg.data.start_method)
        self._iterator: Iterator[Batch | UserError] | None = None

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        self.close()
        self._iterator = iter(self._loader)
        return self

    def __next__(self) -> Batch:
        if self._iterator is None:
            raise StopIteration
        batch = next(self._iterator)
        if isinstance(batch, UserError):
            self.close()
            raise batch
        return batch

    def close(self) -> None:
        """End the loader processes."""
        self._iterator = None  # its last reference: torch then shuts the workers down

    def __enter__(self) -> "TrainLoader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _EvalBatches(Dataset[tuple[Tensor, Tensor] | UserError]):
    def __init__(self, source: ImageSource, size: int, crop_ratio: float) -> None:
        self.source, self.size, self.crop_ratio = source, size, crop_ratio

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor] | UserError:
        try:
            images = [eval_view(self.source.load(index), self.size, self.crop_ratio) for index in indices]
        except UserError as error:
            return error
        return torch.tensor(indices), torch.from_numpy(np.stack(images))


class EvalLoader:
    """Every image exactly once over all processes: process r of W takes every W-th from r on.

    Yields (indices, images) of shapes (B,) int64 and (B, 3, size, size) uint8. The shares of the
    processes, and so their numbers of batches, may differ by one.

    Raises:
        UserError: while iterating: an image can't be read.
    """

    def __init__(
        self,
        source: ImageSource,
        size: int,
        crop_ratio: float,
        batch_size: int,
        process: int = 0,
        num_processes: int = 1,
        num_workers: int = 0,
        start_method: str | None = None,
    ) -> None:
        mine = range(process, len(source), num_processes)
        lists = [list(mine[start : start + batch_size]) for start in range(0, len(mine), batch_size)]
        self._loader = _loader(_EvalBatches(source, size, crop_ratio), lists, num_workers, start_method)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self._loader:
            if isinstance(batch, UserError):
                raise batch
            yield batch


def default_workers(on_cpu: bool | None = None) -> int:
    """Loader processes per training process: the usable CPUs shared out but one, at most 8.

    Zero where the CPUs train as well: there, loaders take more from the steps than they save (two
    cores, the embedded tiles: 227 images/s without, 196 with one).
    """
    if computes_on_cpu() if on_cpu is None else on_cpu:
        return 0
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = usable // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(max(share - 1, 0), MAX_WORKERS)


def _loader(dataset: Dataset, keys: object, workers: int, start_method: str | None) -> DataLoader:
    """Each key (a list) makes one batch; the data set builds it whole, so nothing is collated."""
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=keys,  # type: ignore[arg-type]  # torch only iterates it
        collate_fn=_as_is,
        num_workers=workers,
        worker_init_fn=_start_worker,
        multiprocessing_context=start_method if workers else None,
        pin_memory=torch.cuda.is_available() and not computes_on_cpu(),
        generator=torch.Generator(),  # else torch's own would move on with every iteration
    )


def _as_is(batch: object) -> object:
    return batch


def _start_worker(worker: int) -> None:
    torch.set_num_threads(1)
