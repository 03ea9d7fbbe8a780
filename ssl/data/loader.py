"""Batches of views for training and of images for evaluation.

Shapes used below: B images, n local views, C channels, S and s the sides of global and local views.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from nestling.ssl.config import Config, Data
from nestling.ssl.data.channels import channels
from nestling.ssl.data.course import Course
from nestling.ssl.data.failures import Failure
from nestling.ssl.data.ledger import Ledger
from nestling.ssl.data.order import SampleRef, StepSampler
from nestling.ssl.data.reading import Reader
from nestling.ssl.data.sources.base import ImageSource
from nestling.ssl.data.workers import default_workers, end, explained, following, loader_of, room_for, started
from nestling.ssl.errors import UserError
from nestling.ssl.randomness import Stream, generator
from nestling.ssl.views.evaluation import View
from nestling.ssl.views.on_device import Colors, colors_by_size, colors_on_device, without_colors
from nestling.ssl.views.plan import NUM_GLOBAL, Planned, sizes_at
from nestling.ssl.views.plan import View as PlannedView
from nestling.ssl.views.render import render


@dataclass
class Batch:
    """The views of a micro-batch, grouped by size: global, then local where there are any.

    `failures` are the images that couldn't be read; others stand in for `replaced` of those asked for.
    `colors`, one per group, are left to the device that trains; None where the views have theirs.

    Shape:
        views[0]: (2 B, C, S, S) uint8, the first view of all images, then the second
        views[1]: (n B, C, s, s) uint8, likewise
        indices: (B,) int64, as asked for
    """

    views: list[Tensor]
    indices: Tensor
    step: int
    failures: list[Failure]
    replaced: int
    colors: list[Colors] | None = None

    def pin_memory(self) -> "Batch":
        """Called by the data loader where batches go to a GPU."""
        views = [view.pin_memory() for view in self.views]
        colors = self.colors and [of_group.pin_memory() for of_group in self.colors]
        return replace(self, views=views, colors=colors)

    def to(self, device: torch.device) -> "Batch":
        """Views and colours there, without waiting where memory is pinned; the rest stays."""
        views = [view.to(device, non_blocking=True) for view in self.views]
        colors = self.colors and [of_group.to(device) for of_group in self.colors]
        return replace(self, views=views, colors=colors)


class _TrainBatches(Dataset[Batch | UserError]):
    """References of a micro-batch -> its views: a pure function, whichever process runs it."""

    def __init__(self, source: ImageSource, cfg: Config) -> None:
        self.reader, self.views, self.seed = Reader(source, cfg.data), cfg.views, cfg.seed
        self.channels, self.scaled_decode = channels(cfg.data), cfg.data.scaled_decode
        self.colors_later = colors_on_device(cfg.views)

    def __getitem__(self, refs: list[SampleRef]) -> Batch | UserError:
        try:
            return self._batch(refs)
        except UserError as error:  # returned, as an exception would come back wrapped in a traceback
            return error

    def _batch(self, refs: list[SampleRef]) -> Batch:
        sizes = sizes_at(self.views, self.seed, refs[0].step)
        counts = (NUM_GLOBAL, self.views.num_local)
        groups = [
            room_for((count, len(refs), self.channels, size, size))
            for count, size in zip(counts, sizes, strict=True)
            if count
        ]
        out = [view for group in groups for view in group.numpy()]
        drawn: list[list[PlannedView]] = []
        failures: list[Failure] = []
        replaced = 0
        for place, ref in enumerate(refs):
            random = partial(generator, self.seed, Stream.VIEWS, ref.pass_, ref.image)
            plan = Planned(random, self.views, *sizes)
            smaller = plan if self.scaled_decode else None
            image, failed, size = self.reader.read_or_replace(ref, self.seed, smaller)
            assert image is not None
            replaced += bool(failed)
            failures += failed
            drawn.append(plan.of(*size, image.shape))
            for into, view in zip(out, drawn[-1], strict=True):
                render(without_colors(view) if self.colors_later else view, image, into[place])
        indices = torch.tensor([ref.image for ref in refs])
        views, colors = [group.flatten(0, 1) for group in groups], None
        if self.colors_later:
            colors = colors_by_size(drawn)
        return Batch(views, indices, refs[0].step, failures, replaced, colors)


class TrainLoader:
    """All micro-batches of one process, from `start_step` to the end of training.

    The loader processes live as long as the iteration; `close` ends them, as does leaving a `with`.

    Raises:
        UserError: the images don't fill one step; while iterating, or on leaving the `with`: an image
            can't be read and is not to be skipped, no image can, or a loader process died.
    """

    def __init__(
        self,
        source: ImageSource,
        cfg: Config,
        total_steps: int,
        process: int,
        num_processes: int,
        start_step: int = 0,
        course: Course | None = None,
    ) -> None:
        self.sampler = StepSampler(
            len(source), cfg, total_steps, process, num_processes, start_step, source.blocks, course
        )
        workers = default_workers() if cfg.data.num_workers is None else cfg.data.num_workers
        batches = _TrainBatches(source, cfg)
        self._loader = loader_of(batches, self.sampler, workers, cfg.data.start_method)
        self._iterator: Iterator[Batch | UserError] | None = None

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        self.close()
        self._iterator = started(self._loader)
        return self

    def __next__(self) -> Batch:
        if self._iterator is None:
            raise StopIteration
        batch = following(self._iterator)
        if isinstance(batch, UserError):
            self.close()
            raise batch
        return batch

    def close(self) -> None:
        """End the loader processes."""
        end(self._iterator)
        self._iterator = None

    def __enter__(self) -> "TrainLoader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
        said = explained(error) if error is not None else None
        if said is not None:
            raise UserError(said) from error


class EvalBatch(NamedTuple):
    """Images of a batch as evaluation sees them, without those that can't be read.

    Shape:
        indices: (B,) int64; images: (B, C, S, S) uint8
    """

    indices: Tensor
    images: Tensor
    failures: list[Failure]


class EvalBatches(Dataset[EvalBatch | UserError]):
    """Indices of a batch -> its images under a view, or what is wrong: it runs in loader processes."""

    def __init__(self, source: ImageSource, data: Data, view: View) -> None:
        self.reader, self.view = Reader(source, data), view
        self.channels = channels(data)

    def __getitem__(self, indices: list[int]) -> EvalBatch | UserError:
        try:
            images = room_for((len(indices), self.channels, *self.view.size))
            readable: list[int] = []
            failures: list[Failure] = []
            for index in indices:
                image, failed, _ = self.reader.read(index)
                failures += failed
                if image is not None:
                    images.numpy()[len(readable)] = self.view(image, index)
                    readable.append(index)
        except UserError as error:
            return error
        return EvalBatch(torch.tensor(readable, dtype=torch.long), images[: len(readable)], failures)


class EvalLoader:
    """Every image exactly once over all processes: process r of W takes every W-th of `order` from r on.

    Without `order` that of the dataset; `order` may leave images out. Yields `EvalBatch`es of the
    view's size. The shares of the processes, and so their numbers of batches, may differ by one. With a
    `ledger` it ends as soon as more images than that allows can't be read, so that a disk that is gone
    doesn't take hours to be noticed.

    Raises:
        UserError: while iterating: an image can't be read and is not to be skipped, too many can't, or
            a loader process died.
    """

    def __init__(
        self,
        source: ImageSource,
        data: Data,
        view: View,
        batch_size: int,
        process: int = 0,
        num_processes: int = 1,
        num_workers: int = 0,
        ledger: Ledger | None = None,
        order: Sequence[int] | None = None,
    ) -> None:
        self._ledger = ledger
        mine = (range(len(source)) if order is None else order)[process::num_processes]
        lists = [[*mine[start : start + batch_size]] for start in range(0, len(mine), batch_size)]
        self._loader = loader_of(EvalBatches(source, data, view), lists, num_workers, data.start_method)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[EvalBatch]:
        iterator = started(self._loader)
        num_failures = 0
        try:
            for _ in range(len(self)):
                batch = following(iterator)
                if isinstance(batch, UserError):
                    raise batch
                num_failures += len(batch.failures)
                if self._ledger is not None and batch.failures:
                    self._ledger.refuse_above(num_failures, f", such as {batch.failures[-1]}")
                yield batch
        finally:
            end(iterator)
