"""Which sample when: pure functions of the seed, the step and the place of the process."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from nestling.ssl.config import Config
from nestling.ssl.errors import UserError
from nestling.ssl.randomness import Stream, generator


class SampleRef(NamedTuple):
    """One image at one time: everything its views depend on besides the seed."""

    image: int
    epoch: int
    step: int


def epoch_order(num_images: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of all images, of (seed, epoch) alone.

    Shape:
        returns: (num_images,) int64
    """
    return generator(seed, Stream.ORDER, epoch).permutation(num_images).astype(np.int64, copy=False)


def steps_per_epoch(num_images: int, cfg: Config, num_processes: int) -> int:
    """Whole global batches per epoch; the rest waits for the next epoch's other order.

    Raises:
        UserError: not even one batch is full.
    """
    batch_size, accumulation = cfg.train.batch_size, cfg.train.accumulation
    steps = num_images // (batch_size * accumulation * num_processes)
    if steps == 0:
        fitting = num_images // (accumulation * num_processes)
        advice = (
            f"lower train.batch_size to at most {fitting}"
            if fitting
            else "use more images or fewer processes"
        )
        raise UserError(
            f"{num_images} training images don't fill one step of train.batch_size={batch_size} x "
            f"train.accumulation={accumulation} x {num_processes} processes: {advice}"
        )
    return steps


class StepSampler:
    """The micro-batches of one process, from `start_step` up to `total_steps`.

    Step s of an epoch takes the s-th slice of its order, as long as the global batch; micro-batch m
    of process r of W takes the (m W + r)-th part of that slice. So W processes without
    accumulation and one process that accumulates W times see the same images in a step.
    """

    def __init__(
        self,
        num_images: int,
        cfg: Config,
        total_steps: int,
        process: int,
        num_processes: int,
        start_step: int = 0,
    ) -> None:
        self.num_images = num_images
        self.seed = cfg.seed
        self.batch_size = cfg.train.batch_size
        self.accumulation = cfg.train.accumulation
        self.process, self.num_processes = process, num_processes
        self.steps = range(start_step, total_steps)
        self.steps_per_epoch = steps_per_epoch(num_images, cfg, num_processes)
        self._cached: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.steps) * self.accumulation

    def __iter__(self) -> Iterator[list[SampleRef]]:
        for step in self.steps:
            epoch = step // self.steps_per_epoch
            parts = self.global_batch_indices(step).reshape(self.accumulation, self.num_processes, -1)
            for part in parts[:, self.process]:
                yield [SampleRef(image, epoch, step) for image in part.tolist()]

    def global_batch_indices(self, step: int) -> np.ndarray:
        """The images of a step over all processes and micro-batches, (global batch,) int64."""
        epoch, within = divmod(step, self.steps_per_epoch)
        if self._cached is None or self._cached[0] != epoch:
            self._cached = (epoch, epoch_order(self.num_images, self.seed, epoch))
        size = self.batch_size * self.accumulation * self.num_processes
        return self._cached[1][within * size : (within + 1) * size]
