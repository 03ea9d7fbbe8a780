"""Which sample when: pure functions of the seed, the step and the place of the process.

A *pass* goes once through all images in an order of its own. An epoch is a pass less what doesn't fill
a step, or, where `data.epoch_images` declares its length, a stretch of passes that follow each other.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from nestling.ssl.config import Config
from nestling.ssl.data.course import Course
from nestling.ssl.errors import UserError
from nestling.ssl.randomness import Stream, generator


class SampleRef(NamedTuple):
    """One image at one time: everything its views depend on besides the seed.

    The pass rather than the epoch, as a declared epoch may hold an image more than once.
    """

    image: int
    pass_: int
    step: int


def epoch_order(
    num_images: int, seed: int, epoch: int, blocks: np.ndarray | None = None, window: int = 0
) -> np.ndarray:
    """A permutation of all images, of (seed, epoch) and the blocks alone.

    With blocks, the images of `window` blocks at a time are mixed, the blocks in random order: reading
    stays within few shards. Without blocks, or with window 0, all images are mixed at once.

    Shape:
        blocks: (number of blocks,) int64, where each ends; rising, the last is num_images
        returns: (num_images,) int64
    """
    random = generator(seed, Stream.ORDER, epoch)
    if blocks is None or window == 0:
        return random.permutation(num_images).astype(np.int64, copy=False)
    ends = np.unique(blocks[blocks > 0])  # a subset may leave blocks empty
    starts = np.concatenate([[0], ends[:-1]])
    assert ends[-1] == num_images, "blocks cover all images"
    order = np.empty(num_images, dtype=np.int64)
    filled = 0
    shuffled = random.permutation(len(ends))
    for first in range(0, len(ends), window):
        group = shuffled[first : first + window]
        mixed = np.concatenate([np.arange(starts[block], ends[block]) for block in group])
        random.shuffle(mixed)
        order[filled : filled + len(mixed)] = mixed
        filled += len(mixed)
    return order


def steps_per_epoch(num_images: int, cfg: Config, num_processes: int) -> int:
    """Whole global batches per epoch; the rest waits for the next epoch's other order.

    A declared length, `data.epoch_images`, may be below or above the number of images.

    Raises:
        UserError: not even one batch is full.
    """
    batch_size, accumulation, declared = cfg.train.batch_size, cfg.train.accumulation, cfg.data.epoch_images
    available = num_images if declared is None else declared
    steps = available // (batch_size * accumulation * num_processes)
    if steps == 0:
        fitting = available // (accumulation * num_processes)
        if declared is None:
            images, more = f"{num_images} training images don't", "use more images or fewer processes"
        else:
            images = f"data.epoch_images={declared} doesn't"
            more = "raise data.epoch_images or use fewer processes"
        advice = f"lower train.batch_size to at most {fitting}" if fitting else more
        raise UserError(
            f"{images} fill one step of train.batch_size={batch_size} x "
            f"train.accumulation={accumulation} x {num_processes} processes: {advice}"
        )
    return steps


def course_of(num_images: int, cfg: Config, num_processes: int) -> Course:
    """The course of a run from its first step on.

    Raises:
        UserError: not even one batch is full.
    """
    steps_per_epoch(num_images, cfg, num_processes)
    global_batch = cfg.train.batch_size * cfg.train.accumulation * num_processes
    return Course(num_images, global_batch, cfg.train.epochs, cfg.data.epoch_images)


class StepSampler:
    """The micro-batches of one process, from `start_step` up to `total_steps`.

    Each step takes the next slice of its pass's order, as long as the global batch; micro-batch m
    of process r of W takes the (m W + r)-th part of that slice. So W processes without
    accumulation and one process that accumulates W times see the same images in a step.

    Without a declared epoch, a pass begins with each epoch and drops what doesn't fill a step. With
    one, passes follow each other without a gap, so a slice may end one pass and begin the next.

    Args:
        course: says where in which pass a step begins; without it, a run at one batch from step 0 on.

    Raises:
        UserError: an epoch doesn't fill one step.
    """

    def __init__(
        self,
        num_images: int,
        cfg: Config,
        total_steps: int,
        process: int,
        num_processes: int,
        start_step: int = 0,
        blocks: np.ndarray | None = None,
        course: Course | None = None,
    ) -> None:
        self.num_images, self.blocks = num_images, blocks
        self.seed, self.window = cfg.seed, cfg.data.shuffle_shards
        self.accumulation = cfg.train.accumulation
        self.process, self.num_processes = process, num_processes
        self.course = course_of(num_images, cfg, num_processes) if course is None else course
        self.global_batch = self.course.global_batch
        self.steps = range(start_step, total_steps)
        self._cached: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.steps) * self.accumulation

    def __iter__(self) -> Iterator[list[SampleRef]]:
        for step in self.steps:
            # (2, global batch) -> (2, accumulation, processes, batch)
            parts = self.global_batch_at(step).reshape(2, self.accumulation, self.num_processes, -1)
            for images, passes in zip(*parts[:, :, self.process].tolist(), strict=True):
                yield [SampleRef(image, pass_, step) for image, pass_ in zip(images, passes, strict=True)]

    def global_batch_at(self, step: int) -> np.ndarray:
        """The images of a step over all processes and micro-batches, and the pass of each.

        Shape:
            returns: (2, global batch) int64
        """
        pass_, place = self.course.slice_at(step)
        slices: list[np.ndarray] = []
        missing = self.global_batch
        while missing:
            images = self._order(pass_)[place : place + missing]
            slices.append(np.stack([images, np.full(len(images), pass_)]))
            missing -= len(images)
            pass_, place = pass_ + 1, 0
        return np.concatenate(slices, axis=1)

    def _order(self, pass_: int) -> np.ndarray:
        if self._cached is None or self._cached[0] != pass_:
            self._cached = None  # first, so that two orders of many images are never held at once
            order = epoch_order(self.num_images, self.seed, pass_, self.blocks, self.window)
            self._cached = (pass_, order)
        return self._cached[1]
