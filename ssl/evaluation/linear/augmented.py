"""Heads on augmented images, as DINO's linear evaluation: a crop and a flip of each image in each epoch.

Shapes used below: B images of this process's share of a step, C channels, S pixels of a side.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from nestling.ssl.data.failures import Failure
from nestling.ssl.data.loader import EvalBatch, EvalBatches
from nestling.ssl.data.order import epoch_order
from nestling.ssl.data.sources.base import Subset
from nestling.ssl.data.workers import deaths_explained, end, following, loader_of, started
from nestling.ssl.distributed import failing_together
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.features import untouched
from nestling.ssl.evaluation.linear.descent import Descent
from nestling.ssl.evaluation.linear.heads import HeadGrid, HeadSpec, first_heads
from nestling.ssl.evaluation.linear.scores import Counter, Scores
from nestling.ssl.evaluation.linear.settings import RATES
from nestling.ssl.evaluation.linear.task import Task
from nestling.ssl.randomness import Stream, generator
from nestling.ssl.run.progress import duration
from nestling.ssl.views.plan import TRIES, draw_box
from nestling.ssl.views.render import resize_large

logger = logging.getLogger("nestling")

CROP = 1  # of Stream.PROBE
QUIET = 20.0  # seconds between two lines about the progress


@dataclass(frozen=True)
class RandomCrop:
    """torchvision's RandomResizedCrop, bicubic, then RandomHorizontalFlip, drawn for (seed, epoch, index)."""

    size: tuple[int, int]
    scale: list[float]
    ratio: list[float]
    flip: float
    seed: int
    epoch: int = 0

    def __call__(self, image: np.ndarray, index: int) -> np.ndarray:
        """Shape: (H, W, C) uint8 -> (C, *size) uint8."""
        uniform = generator(self.seed, Stream.PROBE, CROP, self.epoch, index).random(4 * TRIES + 1).tolist()
        top, left, height, width = draw_box(uniform, image.shape[0], image.shape[1], self.scale, self.ratio)
        crop = image[top : top + height, left : left + width]
        return resize_large(crop, self.size, uniform[-1] < self.flip)


class EpochBatches:
    """The keys of a process's batches: (epoch, its share of the next images of the epoch's order).

    All processes have as many; where a step's images are fewer than processes, a share is empty.
    """

    def __init__(self, task: Task, indices: np.ndarray) -> None:
        self._task, self._indices = task, indices
        self._blocks = Subset(task.train, indices).blocks
        self.per_epoch = -(-len(indices) // task.settings.batch_size)

    def __len__(self) -> int:
        return self.per_epoch * self._task.settings.epochs

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        task, settings = self._task, self._task.settings
        window = task.data.shuffle_shards
        for epoch in range(settings.epochs):
            places = epoch_order(len(self._indices), settings.seed, epoch, self._blocks, window)
            order = self._indices[places]
            for start in range(0, len(order), settings.batch_size):
                share = order[start : start + settings.batch_size][task.process :: task.num_processes]
                yield epoch, share.tolist()


class _Crops(Dataset[EvalBatch | UserError]):
    """Keys of `EpochBatches` -> crops, in whatever process."""

    def __init__(self, task: Task) -> None:
        settings = task.settings
        self._view = RandomCrop(task.view.size, settings.scale, settings.ratio, settings.flip, settings.seed)
        self._batches = EvalBatches(task.train, task.data, self._view)

    def __getitem__(self, key: tuple[int, list[int]]) -> EvalBatch | UserError:
        epoch, indices = key
        self._batches.view = replace(self._view, epoch=epoch)
        return self._batches[indices]


class Augmented:
    """SGD on crops, the backbone's work and the steps shared by all processes, which must all call."""

    setting = "lr"
    together = True

    def __init__(self, task: Task) -> None:
        if task.settings.standardise:
            raise UserError(
                "linear.standardise=true is for protocol=cached and protocol=logreg, which know all features "
                "before they begin; set it to false with protocol=dino"
            )
        self.task = task

    def values(self) -> Sequence[float]:
        """The learning rates of the grid."""
        return self.task.settings.lr or RATES

    def fit(self, specs: Sequence[HeadSpec], indices: np.ndarray) -> HeadGrid:
        """Heads trained on those training images; unreadable ones are left out of their steps."""
        task, settings = self.task, self.task.settings
        grid = first_heads(specs, task.widths, len(task.class_names), settings.seed, task.device)
        keys = EpochBatches(task, indices)
        descent = Descent(grid, settings.batch_size, len(keys), settings.momentum, together=True)
        failures: dict[int, Failure] = {}
        began = said = time.perf_counter()
        with self._frozen(), deaths_explained(), self._iterator(keys) as batches:
            for number in range(1, len(keys) + 1):
                batch, problem = _next(batches)
                if batch is not None:
                    failures |= {failure.image: failure for failure in batch.failures}
                descent.step(*self._seen("train", batch), problem)
                if number % keys.per_epoch == 0:
                    task.ledger.exchange([*failures.values()])
                    failures = {}
                    said = _say(number // keys.per_epoch, settings.epochs, began, said)
        return grid

    def score(self, grid: HeadGrid, side: str, indices: np.ndarray) -> Scores:
        """Accuracies on the centre of those images of a side, each seen by one process."""
        counter = Counter(len(grid.specs), self.task.device)
        failures: list[Failure] = []
        with self._frozen(), failing_together(), deaths_explained():
            for batch in self.task.centre_views(side, indices):
                failures += batch.failures
                if len(batch.indices):
                    vectors, labels = self._seen(side, batch)
                    counter.add(grid.logits(vectors), labels)
        scores = counter.scores(together=True)
        self.task.ledger.exchange(failures)
        if not scores.num_images:
            raise UserError(f"none of {len(indices)} images of data.{side} to score heads on can be read")
        return scores

    @contextmanager
    def _frozen(self) -> Iterator[None]:
        with untouched(self.task.trained.backbone), torch.no_grad():
            self.task.trained.backbone.eval()
            yield

    @contextmanager
    def _iterator(self, keys: EpochBatches) -> Iterator[Iterator[EvalBatch | UserError]]:
        task = self.task
        iterator = started(loader_of(_Crops(task), keys, task.num_workers, task.data.start_method))
        try:
            yield iterator
        finally:
            end(iterator)

    def _seen(self, side: str, batch: EvalBatch | None) -> tuple[dict[str, Tensor], Tensor]:
        """Vectors and labels; none of an empty share.

        A process may put no more through the backbone at once than `linear.images_per_pass`.
        """
        if batch is None or not len(batch.indices):
            return {}, torch.empty(0, dtype=torch.long)
        parts = [self.task.vectors(part) for part in batch.images.split(self.task.settings.images_per_pass)]
        vectors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return vectors, self.task.labels_of(side, batch.indices)


def _next(batches: Iterator[EvalBatch | UserError]) -> tuple[EvalBatch | None, UserError | None]:
    """The next batch or what is wrong, which the other processes must hear of before it is raised."""
    try:
        found = following(batches)
    except UserError as error:
        return None, error
    return (None, found) if isinstance(found, UserError) else (found, None)


def _say(epoch: int, num_epochs: int, began: float, said: float) -> float:
    """A line about the progress, not too often; returns when the last one was."""
    now = time.perf_counter()
    if now - said < QUIET:
        return said
    left = (now - began) / epoch * (num_epochs - epoch)
    logger.info(f"epoch {epoch} of {num_epochs}, {duration(left)} left")
    return now
