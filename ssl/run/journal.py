"""What happens between the steps of a run: logging, judging, saving."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from nestling.backbones import Backbone
from nestling.ssl.data.failures import Failure
from nestling.ssl.data.ledger import Ledger
from nestling.ssl.data.loader import Batch
from nestling.ssl.distillation import SelfDistillation
from nestling.ssl.errors import UserError
from nestling.ssl.monitors import CollapseMonitor, Throughput, Window
from nestling.ssl.run.nonfinite import has_broken_weights
from nestling.ssl.run.progress import RunProgress
from nestling.ssl.run.run import LEFT_OUT, Run
from nestling.ssl.run.stopping import Verdict
from nestling.ssl.schedules import Schedules, StepValues

logger = logging.getLogger("nestling")

Judge = Callable[[Backbone, bool], Mapping[str, float]]


class Journal:
    """Keeps the metrics of a run and does what is due after a step.

    `judge` gives the accuracies of a backbone by name, the one that decides first, and what else is found;
    or, told so, only does what the next judgement compares with.
    """

    def __init__(
        self,
        method: SelfDistillation,
        optimizer: Optimizer,
        schedules: Schedules,
        run: Run,
        judge: Judge | None,
        ledger: Ledger,
    ) -> None:
        self.method, self.optimizer, self.schedules, self.run, self.judge = (
            method,
            optimizer,
            schedules,
            run,
            judge,
        )
        self._course, self._ledger = schedules.course, ledger
        self._failures: list[Failure] = []
        self._replaced = 0  # on this process, since the last exchange
        self._replaced_in_epoch = 0  # on all
        self._skipped_steps = 0  # since the last line
        self.throughput = Throughput()
        self._losses, self._gradients = Window(), Window()
        self._monitor = CollapseMonitor(patience=min(max(self._course.steps_per_epoch, 300), 3000))
        self._progress: RunProgress

    @contextmanager
    def opened(self, first_step: int) -> Iterator[None]:
        """Show progress from `first_step` on; judge the untrained network first."""
        mode = self.run.config.log.progress if self.run.is_main else "none"
        self._progress = RunProgress(mode, first_step, self.schedules.num_steps)
        try:
            with self._progress:
                self._ledger.keep_in(self.run.path)
                if first_step == 0:
                    self.run.log(0, {"epoch": 0.0, "images_seen": 0, **self._judged(0)})
                else:
                    self._make_up(first_step)
                if 0 < first_step == self.schedules.num_steps:
                    logger.info(
                        f"this run is finished: all its {first_step} steps are done, its results follow"
                    )
                self.throughput.reset()
                yield
        except BaseException:
            self.run.close(failed=True)
            raise
        self.run.close()

    def micro_batch(self, batch: Batch, loss: Tensor, metrics: Mapping[str, Tensor]) -> None:
        """Gather the metrics of one micro-batch, and what couldn't be read for it."""
        self._losses.add({"loss": loss, **metrics})
        self.throughput.count(len(batch.indices) * self.run.accelerator.num_processes)
        self._failures += batch.failures
        self._replaced += batch.replaced

    def step(self, index: int, values: StepValues, gradient_norm: Tensor, verdict: Verdict) -> None:
        """Log, save and judge what is due after the step `index`, counted from 0.

        Judging may take longer than a launcher waits after its signal, so it comes last; whoever stops before
        it or is killed in it leaves that to the next start.
        """
        finished, config = index + 1, self.run.config
        self._skipped_steps += verdict.is_bad
        self._gradients.add({"gradient_norm": gradient_norm})
        self._progress.step(finished)
        due = self.judge is not None and self._is_due(finished, config.knn.every)
        saving = self._is_due(finished, config.train.checkpoint_every) or verdict.code != 0
        epoch_ends = self._course.ends_epoch(finished)
        if not (index == 0 or finished % config.log.every == 0 or epoch_ends or due or saving):
            return
        record = {
            **self._read(finished, values),
            "replaced_images": self._exchanged(),
            "skipped_steps": self._skipped_steps,
        }
        self._skipped_steps = 0
        if epoch_ends:
            self._end_epoch(finished)
        self.run.log(finished, record | ({LEFT_OUT: True} if due else {}))
        self.run.check()
        if saving:
            self._refuse_broken_weights(finished)
            self.run.checkpoint(finished, self.method, self.optimizer)
        if due and verdict.code == 0:
            self._judge(finished, record)
        self.throughput.reset()

    def _exchanged(self) -> int:
        """Tell all processes of unreadable images; how many samples of this epoch others stand in for."""
        self._replaced_in_epoch += self._ledger.exchange(self._failures, self._replaced)
        self._failures, self._replaced = [], 0
        return self._replaced_in_epoch

    def _end_epoch(self, finished: int) -> None:
        if self._replaced_in_epoch:
            logger.info(
                f"epoch {self._course.at(finished).epoch}: {self._replaced_in_epoch} unreadable images "
                "were replaced by others"
            )
        self._replaced_in_epoch = 0

    def _make_up(self, finished: int) -> None:
        """Do what is still due after the step that a run goes on from.

        That is its judgement, where a stop or a kill left that out, what the next one compares with, where
        its own was after the checkpoint, and the end of its epoch, where no step of the batch fits into that.
        """
        record = self.run.logged_at(finished)
        self.run.remember(deciding(record))  # its checkpoint, saved before it was judged, doesn't know
        due = record.pop(LEFT_OUT, False)
        if not self._course.ends_epoch(finished) or self._course.left_over:
            self._replaced_in_epoch = record.get("replaced_images", 0)
        if self._course.left_over:
            self._end_epoch(finished)
            due = bool(record) and (due or self._is_due(finished, self.run.config.knn.every))
            record["epoch"] = self._course.epoch_at(finished)
        if due and self.judge is not None:
            self._judge(finished, record)
        elif self.judge is not None and finished < self.schedules.num_steps and is_watched(record):
            logger.info(f"looking at the features after step {finished} again, for the next to be compared")
            self.judge(self.method.teacher.backbone, True)

    def _judge(self, finished: int, record: Mapping[str, Any]) -> None:
        found = self._judged(finished)
        self.run.judged(finished, record, found, deciding(found))

    def _is_due(self, finished: int, every_epochs: float) -> bool:
        """Whether something that comes every so many epochs comes after `finished` steps; 0: never."""
        if every_epochs == 0:
            return False
        interval = max(1, self.schedules.steps_in(every_epochs))
        return self._course.passes(finished, interval) or finished == self.schedules.num_steps

    def _read(self, finished: int, values: StepValues) -> dict[str, float]:
        """The record of the window that ends after `finished` steps; the means of what was finite."""
        (losses, _), (gradients, _) = self._losses.read(), self._gradients.read()
        record = {
            "epoch": self._course.epoch_at(finished),
            "images_seen": self._course.at(finished).images_seen,
            **losses,
            **gradients,
            **asdict(values),
            **self.throughput.read(),
        }
        if "dino/teacher_entropy" in losses:
            for warning in self._monitor.check(finished, losses):
                logger.warning(warning)
        self._progress.record(finished, record)
        return record

    def _refuse_broken_weights(self, finished: int) -> None:
        """Save no weights that the step itself made infinite: the checkpoint before is worth more."""
        if has_broken_weights(self.method):
            raise UserError(
                f"weights are not finite after step {finished}, so they are not saved: start again with a "
                "lower optim.lr, with optim.clip_mode, or with train.precision=bf16 or fp32"
            )

    def _judged(self, finished: int) -> dict[str, float]:
        """What is found of the teacher's backbone after `finished` steps: k-NN, or what needs no labels."""
        if self.judge is None:
            return {}
        accuracies = dict(self.judge(self.method.teacher.backbone, False))
        name, value = next(iter(accuracies.items()))
        (self._progress.knn if is_accuracy(name) else self._progress.rankme)(value)
        logger.info(
            f"epoch {self._course.epoch_at(finished):.4g}: "
            + "  ".join(
                f"{name} {value:.1%}" if is_accuracy(name) else f"{name} {value:.4g}"
                for name, value in accuracies.items()
            )
        )
        return accuracies


def is_accuracy(name: str) -> bool:
    """Whether a judgement is an accuracy, which can decide; what is found without labels is none."""
    return name.startswith("knn/")


def is_watched(record: Mapping[str, Any]) -> bool:
    """Whether features were judged, which the next judgement compares with."""
    return any(name.startswith("features/") for name in record)


def deciding(found: Mapping[str, float]) -> float | None:
    """The accuracy that says which checkpoint is the best, where there is one."""
    return next((value for name, value in found.items() if is_accuracy(name)), None)
