"""`train.batch_size=auto`: the largest that fits, found by steps on random images before the run begins."""

import logging
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator

from nestling.ssl import allocator, distributed, optim
from nestling.ssl.config import AUTO, Config
from nestling.ssl.data.channels import channels
from nestling.ssl.data.loader import Batch
from nestling.ssl.data.order import steps_per_epoch
from nestling.ssl.data.workers import default_workers
from nestling.ssl.distillation import SelfDistillation
from nestling.ssl.errors import UserError
from nestling.ssl.randomness import Stream, generator
from nestling.ssl.run import checkpoints, memory
from nestling.ssl.run.directory import refuse_taken
from nestling.ssl.run.disk import checkpoint_bytes
from nestling.ssl.run.fitting import fitting_on, largest
from nestling.ssl.run.loading import saved_config
from nestling.ssl.schedules import StepValues
from nestling.ssl.training import compared
from nestling.ssl.views.on_device import colors_by_size, colors_on_device
from nestling.ssl.views.plan import NUM_GLOBAL, draw

logger = logging.getLogger("nestling")

AHEAD = 3  # batches per loader process: two finished (torch's prefetch_factor), one in the making


def with_batch_size(config: Config, accelerator: Accelerator, num_images: int) -> Config:
    """The config with a number in the place of `auto`; a run that goes on keeps the one it has.

    All processes call this together and get the same number.

    Raises:
        UserError: the images don't fill a step, not one image fits, or this device can't be tried.
    """
    if config.train.batch_size != AUTO:
        return config
    begun = checkpoints.newest(Path(config.out)) if config.resume != "never" else None
    if begun is not None:
        kept = saved_config(begun).train.batch_size
        logger.info(f"train.batch_size=auto: {kept}, as this run has it already")
        return _with(config, kept)
    single = _with(config, 1)
    most = steps_per_epoch(num_images, single, accelerator.num_processes)
    with distributed.failing_together():
        if accelerator.is_main_process:
            refuse_taken(config)  # before the memory of the run that holds it is tried
    found, where = _tried(single, accelerator, most)
    accelerator.free_memory()  # which forgets the networks that steps were tried with
    allocator.give_back()
    if not found:
        raise UserError(
            f"train.batch_size=auto: not even one image fits ({where}): {memory.advice_in_training(single)}"
        )
    bound = "fill a step" if found == largest(lambda number: True, most) else "fit"
    logger.info(f"train.batch_size=auto: {found}, the most that {bound} ({where})")
    return _with(config, found)


def _with(config: Config, batch_size: int) -> Config:
    return replace(config, train=replace(config.train, batch_size=batch_size))


def _tried(config: Config, accelerator: Accelerator, most: int) -> tuple[int, str]:
    """The largest batch that fits on all processes, and into what."""
    device = accelerator.device
    fitting = fitting_on(device)
    accelerator.wait_for_everyone()  # all have looked at the memory before one takes more of it

    def fits_everywhere(number: int) -> bool:
        fails = torch.tensor(float(not fitting.fits(number)), device=device)
        return not distributed.largest(fails).item()

    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        fitting.begin(DryStep(config, accelerator))
        return largest(fits_everywhere, most), str(fitting)


class DryStep:
    """A step of training on random images of the largest sizes, with networks of its own.

    Processes don't exchange gradients: one that ran out of memory would leave the others waiting.
    """

    def __init__(self, config: Config, accelerator: Accelerator) -> None:
        self.config, self.accelerator = config, accelerator
        self.method = SelfDistillation(config).to(accelerator.device)
        groups = optim.parameter_groups(self.method.student)
        self.optimizer = optim.build(config.optim, groups, accelerator.scaler is None)
        self.student = accelerator.prepare_model(self.method.student)
        self.values = StepValues(0.0, 0.0, 1.0, config.teacher.temperature, False, False)
        views, workers = config.views, config.data.num_workers
        self.sizes = max(views.global_size), max(views.local_size)
        self.groups = list(zip((NUM_GLOBAL, views.num_local), self.sizes, strict=True))
        self.image_bytes = channels(config.data) * sum(count * side**2 for count, side in self.groups)
        self.waiting = AHEAD * (default_workers() if workers is None else workers)
        self.reserved = checkpoint_bytes(self.method, config.optim.name)  # its copy, while it is written
        self.has_moments = False

    def __call__(self, batch_size: int) -> None:
        """One step; the first time two, as the optimizer has its moments from the second on."""
        for _ in range(1 if self.has_moments else 2):
            self._step(batch_size)
            self.has_moments = True

    def _step(self, batch_size: int) -> None:
        try:
            with self.accelerator.no_sync(self.student):
                for _ in range(min(self.config.train.accumulation, 2)):  # the second beside gradients
                    self._micro_batch(batch_size)
            optim.apply(self.optimizer, self.values)
            optim.clip(self.method.student.parameters(), self.config.optim.clip_mode, self.config.optim.clip)
            self.optimizer.step()
        finally:
            self.optimizer.zero_grad(set_to_none=True)

    def _micro_batch(self, batch_size: int) -> None:
        batch = self._random(batch_size).to(self.accelerator.device)  # where it is prefetched to
        loss, _ = compared(self.method, self.student, batch, self.values, self.config, self.accelerator)
        loss.backward()

    def _random(self, batch_size: int) -> Batch:
        """Images of noise, with colours where the device does them."""
        config, count_of = self.config, channels(self.config.data)
        views = [
            torch.randint(256, (count * batch_size, count_of, side, side), dtype=torch.uint8)
            for count, side in self.groups
            if count
        ]
        batch = Batch(views, torch.arange(batch_size), 0, [], 0)
        if colors_on_device(config.views):
            random = generator(config.seed, Stream.VIEWS)
            drawn = [draw(random, *self.sizes, config.views, *self.sizes) for _ in range(batch_size)]
            batch.colors = colors_by_size(drawn)
        return batch
