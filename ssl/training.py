"""The loop, and nothing else: DINO's algorithm 1 with accumulation."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from nestling.ssl import optim
from nestling.ssl.config import Config
from nestling.ssl.data.channels import normalisation
from nestling.ssl.data.ledger import Ledger
from nestling.ssl.data.loader import Batch
from nestling.ssl.data.prefetch import Prefetched, prefetched
from nestling.ssl.distillation import SelfDistillation
from nestling.ssl.distributed import failing_together
from nestling.ssl.randomness import Stream, generator
from nestling.ssl.run import sharding
from nestling.ssl.run.journal import Journal, Judge
from nestling.ssl.run.nonfinite import Forward, NonFiniteSteps
from nestling.ssl.run.run import Run
from nestling.ssl.run.stopping import Stopping
from nestling.ssl.schedules import Schedules, StepValues
from nestling.ssl.views.on_device import colored
from nestling.ssl.views.render import normalize

Batches = AbstractContextManager[Iterable[Batch]]


def train(
    method: SelfDistillation,
    batches_from: Callable[[int], Batches],
    schedules: Schedules,
    run: Run,
    judge: Judge | None,
    ledger: Ledger,
    path_of: Callable[[int], str],
    stopping: Stopping,
    accelerator: Accelerator,
) -> int:
    """Train `method.student` to predict `method.teacher`, its moving average; returns an exit code.

    `batches_from(step)` opens the micro-batches from that step on. `judge` rates a backbone; the
    first of its accuracies decides which checkpoint is the best. `ledger` counts the unreadable images,
    `path_of` names them. The code is 0, or the one that `stopping` asks for; then the last step is saved.

    Raises:
        UserError: the loss or a gradient is no longer finite, or too many images are unreadable.
    """
    config = run.config
    # A fused optimizer hides from accelerate that fp16 gradients overflowed and its step was skipped.
    fused = accelerator.scaler is None
    own_optimizer = optim.build(config.optim, optim.parameter_groups(method.student), fused)
    student, optimizer = sharding.prepared(method, own_optimizer, accelerator, config)
    first_step = run.restore(method, own_optimizer)
    journal = Journal(method, own_optimizer, schedules, run, judge, ledger)

    repeat = partial(repeated, method, student, batches_from, schedules, config, accelerator)
    nonfinite = NonFiniteSteps(method, own_optimizer, schedules, run, repeat, path_of)
    with batches_from(first_step) as loader, journal.opened(first_step):
        batches = prefetched(iter(loader), accelerator.device)
        for step in range(first_step, schedules.num_steps):
            values = schedules.at(step)
            optim.apply(own_optimizer, values)
            seed_step(config.seed, step, accelerator.process_index)
            nonfinite.begin()

            losses = accumulated(method, student, batches, values, journal, accelerator)
            gradient_norm = clipped(method, optimizer, config, accelerator)
            is_last = step + 1 == schedules.num_steps
            verdict = stopping.agreed(nonfinite.found(losses, gradient_norm), is_last)
            if verdict.is_bad:
                nonfinite.leave_out(step)
                forget_gradients(optimizer, accelerator)
            else:
                nonfinite.passed()
                update_student(method, optimizer, values)
                method.update_teacher(1.0 if accelerator.optimizer_step_was_skipped else values.momentum)
            journal.step(step, values, gradient_norm, verdict)
            if verdict.code:
                return verdict.code
    nothing_bad = torch.zeros((), dtype=torch.bool, device=accelerator.device)
    return stopping.agreed(nothing_bad, is_finished=True).code


def accumulated(
    method: SelfDistillation,
    student: nn.Module,
    batches: Prefetched,
    values: StepValues,
    journal: Journal,
    accelerator: Accelerator,
) -> list[Tensor]:
    """The gradients of a step's micro-batches, summed in the student; returns the loss of each."""
    config, losses = journal.run.config, []
    for _ in range(config.train.accumulation):
        batch = journal.throughput.waiting(batches)
        with accelerator.accumulate(student):
            loss, metrics = compared(method, student, batch, values, config, accelerator)
            accelerator.backward(loss)
            journal.micro_batch(batch, loss, metrics)
            losses.append(loss.detach())
        journal.throughput.waited(batches.fetch())
    return losses


def repeated(
    method: SelfDistillation,
    student: nn.Module,
    batches_from: Callable[[int], Batches],
    schedules: Schedules,
    config: Config,
    accelerator: Accelerator,
    step: int,
) -> Iterator[Forward]:
    """The forward passes of a step once more, on the same views and with the same draws.

    All is read first: where networks are sharded, no process may stop between their passes.
    """
    with failing_together(), batches_from(step) as loader:
        batches = list(islice(loader, config.train.accumulation))
    seed_step(config.seed, step, accelerator.process_index)
    for batch in batches:
        yield batch, *compared(method, student, batch, schedules.at(step), config, accelerator)


def compared(
    method: SelfDistillation,
    student: nn.Module,
    batch: Batch,
    values: StepValues,
    config: Config,
    accelerator: Accelerator,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The student on all views of a micro-batch against the teacher on the global ones."""
    views, size = on_device(batch, config, accelerator.device), len(batch.indices)
    with accelerator.autocast():
        targets = method.targets(views[0], size)
        outputs = student(views, size)
    return method.loss(outputs, targets, values.temperature)


def clipped(
    method: SelfDistillation, optimizer: AcceleratedOptimizer, config: Config, accelerator: Accelerator
) -> Tensor:
    """Clip the gradients; returns their norm before."""
    accelerator.unscale_gradients(optimizer)
    return optim.clip(method.student.parameters(), config.optim.clip_mode, config.optim.clip)


def update_student(method: SelfDistillation, optimizer: AcceleratedOptimizer, values: StepValues) -> None:
    """Freeze what is frozen, then step; accelerate skips the step where fp16 gradients overflowed."""
    if values.last_layer_frozen:
        optim.freeze(method.student.head.last_layer)
    if values.backbone_frozen:
        optim.freeze(method.student.backbone)
    optimizer.step()
    optimizer.zero_grad()


def forget_gradients(optimizer: AcceleratedOptimizer, accelerator: Accelerator) -> None:
    """Leave a step out; where gradients are scaled, the scale goes down as after an overflow."""
    if accelerator.scaler is not None:
        accelerator.scaler.update()
    optimizer.zero_grad()


def on_device(batch: Batch, config: Config, device: torch.device) -> list[Tensor]:
    """The views of a micro-batch as normalised floats; they travel as bytes."""
    batch, (mean, std) = batch.to(device), normalisation(config.data)
    views: Iterable[Tensor] = batch.views
    if batch.colors is not None:
        views = map(colored, views, batch.colors)
    return [normalize(view, mean, std) for view in views]


def seed_step(seed: int, step: int, process: int) -> None:
    """Make the networks' own draws (drop path) a function of (seed, step, process).

    So nothing that draws between steps, evaluation included, can change what training does next,
    and a resumed run needs no saved random state.
    """
    torch.manual_seed(int(generator(seed, Stream.NETWORK, step, process).integers(2**62)))
