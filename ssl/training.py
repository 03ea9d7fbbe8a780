"""The loop, and nothing else: DINO's algorithm 1 with accumulation."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor

from nestling.ssl import optim
from nestling.ssl.config import Config
from nestling.ssl.data.channels import normalisation
from nestling.ssl.data.ledger import Ledger
from nestling.ssl.data.loader import Batch
from nestling.ssl.distillation import SelfDistillation
from nestling.ssl.randomness import Stream, generator
from nestling.ssl.run.journal import Journal, Judge
from nestling.ssl.run.run import Run
from nestling.ssl.schedules import Schedules, StepValues
from nestling.ssl.views.render import normalize

Batches = AbstractContextManager[Iterable[Batch]]


def train(
    method: SelfDistillation,
    batches_from: Callable[[int], Batches],
    schedules: Schedules,
    run: Run,
    judge: Judge | None,
    ledger: Ledger,
    accelerator: Accelerator,
) -> Journal:
    """Train `method.student` to predict `method.teacher`, its moving average.

    `batches_from(step)` opens the micro-batches from that step on. `judge` rates a backbone; the
    first of its values decides which checkpoint is the best. `ledger` counts the unreadable images.

    Raises:
        UserError: the loss or a gradient is no longer finite, or too many images are unreadable.
    """
    config = run.config
    # A fused optimizer hides from accelerate that fp16 gradients overflowed and its step was skipped.
    fused = accelerator.scaler is None
    own_optimizer = optim.build(config.optim, optim.parameter_groups(method.student), fused)
    first_step = run.restore(method, own_optimizer)
    student, optimizer = accelerator.prepare(method.student, own_optimizer)
    journal = Journal(method, own_optimizer, schedules, run, judge, ledger)

    with batches_from(first_step) as loader, journal.opened(first_step):
        batches = iter(loader)
        for step in range(first_step, schedules.num_steps):
            values = schedules.at(step)
            optim.apply(own_optimizer, values)
            seed_step(config.seed, step, accelerator.process_index)

            for _ in range(config.train.accumulation):
                batch = journal.throughput.waiting(batches)
                views, size = on_device(batch, config, accelerator.device), len(batch.indices)
                with accelerator.accumulate(student):
                    with accelerator.autocast():
                        targets = method.targets(views[0], size)
                    loss, metrics = method.loss(student(views, size), targets, values.temperature)
                    accelerator.backward(loss)
                    journal.micro_batch(batch, loss, metrics)

            gradient_norm = update_student(method, optimizer, values, config, accelerator)
            method.update_teacher(1.0 if accelerator.optimizer_step_was_skipped else values.momentum)
            journal.step(step, values, gradient_norm)
    return journal


def update_student(
    method: SelfDistillation,
    optimizer: AcceleratedOptimizer,
    values: StepValues,
    config: Config,
    accelerator: Accelerator,
) -> Tensor:
    """Clip, freeze what is frozen, step; returns the gradient norm before clipping.

    accelerate skips the step where fp16 gradients overflowed.
    """
    accelerator.unscale_gradients(optimizer)
    norm = optim.clip(method.student.parameters(), config.optim.clip_mode, config.optim.clip)
    if values.last_layer_frozen:
        optim.freeze(method.student.head.last_layer)
    if values.backbone_frozen:
        optim.freeze(method.student.backbone)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def on_device(batch: Batch, config: Config, device: torch.device) -> list[Tensor]:
    """The views of a micro-batch as normalised floats; they travel as bytes."""
    mean, std = normalisation(config.data)
    return [normalize(view.to(device, non_blocking=True), mean, std) for view in batch.views]


def seed_step(seed: int, step: int, process: int) -> None:
    """Make the networks' own draws (drop path) a function of (seed, step, process).

    So nothing that draws between steps, evaluation included, can change what training does next,
    and a resumed run needs no saved random state.
    """
    torch.manual_seed(int(generator(seed, Stream.NETWORK, step, process).integers(2**62)))
