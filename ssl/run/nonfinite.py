"""Steps whose loss or gradient is NaN or infinite: told, then refused or left out."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nestling.ssl.compiling import eagerly
from nestling.ssl.data.loader import Batch
from nestling.ssl.distillation import SelfDistillation
from nestling.ssl.distributed import everyones, failing_together, largest, local
from nestling.ssl.errors import UserError
from nestling.ssl.names import printable
from nestling.ssl.run import directory
from nestling.ssl.run.run import Run
from nestling.ssl.schedules import Schedules
from nestling.ssl.terms import Term

logger = logging.getLogger("nestling")

MOST_IN_A_ROW = 10  # steps left out; after that many the weights themselves are at fault
GRADIENTS_TOLD = 5

Forward = tuple[Batch, Tensor, Mapping[str, Tensor]]  # a micro-batch, its loss, its metrics


class NonFiniteSteps:
    """Sees that no step with NaN or infinities in it changes what is learned.

    All that forward passes change, the statistics of batch norms above all, is put back as it was before
    the step. With `train.on_nan=skip` training goes on from there, else that state is put aside.

    Args:
        repeat: computes the forward passes of a step anew.
        path_of: names the file of an image.
    """

    def __init__(
        self,
        method: SelfDistillation,
        optimizer: Optimizer,
        schedules: Schedules,
        run: Run,
        repeat: Callable[[int], Iterator[Forward]],
        path_of: Callable[[int], str],
    ) -> None:
        self._method, self._optimizer, self._schedules, self._run = method, optimizer, schedules, run
        self._repeat, self._path_of = repeat, path_of
        self._skips = run.config.train.on_nan == "skip"
        self._kept: list[Tensor] = []
        self._in_a_row = 0
        self._is_told = False

    def _buffers(self) -> Iterator[Tensor]:
        for network in (self._method.student, self._method.teacher):
            yield from network.buffers()

    @torch.no_grad()
    def begin(self) -> None:
        """Remember what the forward passes of a step will change."""
        if not self._kept:
            self._kept = [buffer.clone() for buffer in self._buffers()]
        else:
            torch._foreach_copy_(self._kept, list(self._buffers()))

    def found(self, losses: Sequence[Tensor], gradient_norm: Tensor) -> Tensor:
        """Whether this process's step is bad: (), bool. Gradients of fp16 are left to their scaler."""
        judged = [loss.float() for loss in losses]
        if self._run.accelerator.scaler is None:
            judged.append(gradient_norm.float())
        return torch.stack(judged).isfinite().all().logical_not()

    def passed(self) -> None:
        """The step was finite."""
        self._in_a_row = 0

    def leave_out(self, step: int) -> None:
        """Tell what is wrong with `step`, whose gradients are still there, and undo its forward passes.

        All processes call this together.

        Raises:
            UserError: it is not to be left out, or too many were so in a row.
        """
        self._in_a_row += 1
        if not self._skips or self._in_a_row == MOST_IN_A_ROW:
            told = self._told(step)
            self._undo()
            self._stop(step, told)
        if not self._is_told:
            logger.warning(f"step {step + 1} is not finite: {self._told(step)}")
        logger.warning(f"step {step + 1} is left out: its loss or a gradient is not finite")
        self._undo()

    @torch.no_grad()
    def _undo(self) -> None:
        for buffer, kept in zip(self._buffers(), self._kept, strict=True):
            buffer.copy_(kept)
        for term in self._method.terms.children():
            assert isinstance(term, Term)
            term.discard()

    def _told(self, step: int) -> str:
        """Write nonfinite.json; who is to blame, and where more is told, in words."""
        with failing_together():
            part = self._part(step)
        parts = everyones([part])
        values, path = self._schedules.at(step), self._run.path / directory.NONFINITE
        report = {"step": step + 1, "epoch": self._schedules.course.epoch_at(step), **asdict(values)}
        report["student_temperature"] = self._run.config.head.temperature
        self._is_told = True
        is_written = any(everyones([self._write({**report, "processes": parts}, path)]))
        more = f"{printable(path)} {'names its images' if is_written else 'could not be written'}"
        return f"{_blamed(parts)}; {more}"

    def _write(self, report: Mapping[str, Any], path: Path) -> bool:
        """Let the main process write the report; whether it could. Its words are worth more than the file."""
        if not self._run.is_main:
            return False
        try:
            directory.write_json(path, report)
        except UserError as error:
            logger.warning(str(error))
            return False
        return True

    def _stop(self, step: int, told: str) -> NoReturn:
        """Put the state before `step` aside, unless that is broken already, and end the run."""
        folder, lr = self._run.path / directory.ASIDE, self._schedules.at(step).lr
        is_aside = not has_broken_weights(self._method) and self._run.put_aside(
            step, self._method, self._optimizer
        )
        aside = f"{printable(folder)} holds the state before it. " if is_aside else ""
        again = "" if self._in_a_row == 1 else f", as in {self._in_a_row} steps in a row"
        raise UserError(
            f"step {step + 1} has a loss or gradient that is not finite{again} (learning rate {lr:.2e}; "
            f"{told}); nothing of it was applied or saved. {aside}resume=auto train.on_nan=skip goes on "
            "without such steps; else start again with a lower optim.lr, with optim.clip_mode, or with "
            "train.precision=bf16 or fp32"
        )

    def _part(self, step: int) -> dict[str, Any]:
        """What this process knows: its images, losses, and who was the first to output NaN or infinities."""
        gradients = [
            name
            for name, parameter in self._method.student.named_parameters()
            if parameter.grad is not None and not local(parameter.grad).isfinite().all()
        ]
        forwards = []
        with torch.no_grad(), eagerly(self._run.config), watched(self._method) as bad_modules:
            for batch, loss, metrics in self._repeat(step):
                files = [self._path_of(index) for index in batch.indices.tolist()]
                numbers = {name: _plain(value) for name, value in metrics.items()}
                forwards.append({"loss": _plain(loss), "metrics": numbers, "files": files})
        return {
            "process": self._run.accelerator.process_index,
            "first_module": next(iter(bad_modules), None),
            "gradients": gradients[:GRADIENTS_TOLD],
            "num_gradients": len(gradients),
            "micro_batches": forwards,
        }


@torch.no_grad()
def has_broken_weights(method: SelfDistillation) -> bool:
    """Whether a weight or statistic of any process, which may hold a part, is not finite; all call this."""
    own = [local(tensor) for tensor in method.state_dict().values() if tensor.is_floating_point()]
    norms = torch._foreach_norm([tensor for tensor in own if tensor.numel()], math.inf)
    is_broken = torch.stack(norms).isfinite().all().logical_not()
    return bool(largest(is_broken.float()))


@contextmanager
def watched(module: nn.Module) -> Iterator[list[str]]:
    """Gather the names of the modules inside whose outputs are not finite, the first to end first."""
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(_: nn.Module, __: object, output: object) -> None:
            if not all(tensor.isfinite().all() for tensor in tensors_in(output)):
                found.append(name)

        return hook

    hooks = [child.register_forward_hook(watch(name)) for name, child in module.named_modules() if name]
    try:
        yield found
    finally:
        for handle in hooks:
            handle.remove()


def tensors_in(output: object) -> Iterator[Tensor]:
    """The floating-point tensors in what a module returned, however deep."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        yield from tensors_in(list(output.values()))
    elif isinstance(output, Sequence) and not isinstance(output, str):
        for item in output:  # of deferred logits too, which calls the last layer
            yield from tensors_in(item)
    elif is_dataclass(output):
        yield from tensors_in(vars(output))


def _plain(value: Tensor) -> float | str:
    """A number, or the name of what JSON has no number for."""
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _blamed(parts: Sequence[Mapping[str, Any]]) -> str:
    """Who is to blame, in words: a module's output before gradients, as those spread to all processes."""
    for part in parts:
        if part["first_module"] is not None:
            return f"first in the output of {part['first_module']} on process {part['process']}"
    for part in parts:
        if part["gradients"]:
            return f"first in the gradient of {part['gradients'][0]}"
    return "finite when computed again"
