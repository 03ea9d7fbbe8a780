"""A run: its directory, log, checkpoints and trackers, written by the main process alone."""

import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from omegaconf import OmegaConf
from torch import Tensor
from torch.optim import Optimizer

from nestling.ssl import command_line
from nestling.ssl.config import Config
from nestling.ssl.data.course import Course
from nestling.ssl.distillation import SelfDistillation
from nestling.ssl.distributed import everyones, failing_together, patiently
from nestling.ssl.run import changes, checkpoints, directory, sharding
from nestling.ssl.run.disk import replaced
from nestling.ssl.run.log import JsonLog, read
from nestling.ssl.run.writing import CheckpointWriter, saved_aside

logger = logging.getLogger("nestling")

LEFT_OUT = "judging_left_out"  # in the log's last line while its step is still to be judged


class Run:
    """Claims `config.out` and writes everything that a run leaves there.

    `course` is that of a new run; the attribute begins where the run goes on. `judged` is what judges keep
    from one evaluation to the next: it is saved with each checkpoint, and filled from the one that goes on.

    Raises:
        UserError: on every process alike, where the directory can't be used as asked.
    """

    def __init__(
        self,
        config: Config,
        accelerator: Accelerator,
        course: Course,
        judged: dict[str, Tensor] | None = None,
    ) -> None:
        self.config, self.course = config, course
        self._judged = {} if judged is None else judged
        self.facts = changes.facts(course, config, accelerator.num_processes)
        self.path = Path(config.out)
        self.accelerator = accelerator
        self.is_main = accelerator.is_main_process
        self.best: float | None = None
        self.resumed_from = self._claim()
        self._log: JsonLog | None = None
        self._writer = CheckpointWriter(self.path, config.train.keep_last, config.train.on_full_disk)
        self._saved_step = 0
        if config.log.trackers:
            settings = {key: str(value) for key, value in flat(asdict(config)).items()}
            accelerator.init_trackers(directory.TRACKED, config=settings)

    def _claim(self) -> Path | None:
        answer: list[Any] = [None, self.course]
        with failing_together(), patiently():
            if self.is_main:
                resumed_from = directory.claim(self.config)
                answer = [resumed_from, self._describe(resumed_from)]
        broadcast_object_list(answer)
        self.course = answer[1]
        return answer[0]

    def _describe(self, resumed_from: Path | None) -> Course:
        """Write config.yaml and environment.json, after comparing with the run that goes on.

        Returns the course from where it stands.
        The config is written as one that starts the same run elsewhere: it neither resumes nor deletes.
        """
        course = self.course
        if resumed_from is not None:
            old: Any = OmegaConf.to_container(OmegaConf.load(resumed_from / directory.CONFIG))
            began = flat(asdict(Config(terms={}))) | flat(old)  # a key it didn't know had today's default
            directory.refuse_changes(began, flat(asdict(self.config)), self.config.out)
            trainer = checkpoints.load_trainer(resumed_from)
            changes.refuse_foreign(resumed_from, trainer, self.facts)
            course = changes.continued(course, self.config, self.facts, trainer)
        directory.write_json(self.path / directory.ENVIRONMENT, directory.environment())
        plain = replace(self.config, resume="never", overwrite=False)
        with replaced(self.path / directory.CONFIG) as draft:
            command_line.write(plain, draft)
        return course

    def restore(self, method: SelfDistillation, optimizer: Optimizer) -> int:
        """Load the checkpoint to go on from, if any; returns the number of finished steps."""
        step = 0
        if self.resumed_from is not None:
            checkpoint = checkpoints.load(self.resumed_from)
            sharding.load(method.student, checkpoint.student)
            sharding.load(method.teacher, checkpoint.teacher)
            method.terms.load_state_dict(checkpoint.terms)
            sharding.load_optimizer(optimizer, checkpoint.optimizer)
            if self.accelerator.scaler is not None and checkpoint.trainer["scaler"]:
                self.accelerator.scaler.load_state_dict(checkpoint.trainer["scaler"])
            self.best = checkpoint.trainer["best"]
            self._judged.update(checkpoint.judged)
            step = checkpoint.trainer["step"]
            logger.info(f"resuming from {self.resumed_from} after step {step}")
        self._saved_step = step
        with failing_together():
            if self.is_main:
                checkpoints.recover(self.path, self.resumed_from)
                resumed = self.resumed_from is not None
                if self.resumed_from is not None and self._keeps(self.course.start.epoch, step):
                    checkpoints.keep(self.resumed_from)  # a larger batch ends its epoch late
                self._log = JsonLog(self.path / directory.LOG, last_step=step if resumed else None)
        return step

    def log(self, step: int, record: Mapping[str, Any]) -> None:
        """One line in log.jsonl, and the same to the trackers."""
        if self._log is not None:
            self._log.write({"step": step, **record})
        if self.config.log.trackers:
            told = {name: value for name, value in record.items() if name != LEFT_OUT}
            self.accelerator.log(told, step=step)

    def logged_at(self, step: int) -> dict[str, Any]:
        """The record of a step, the same on all processes; {} where a full disk kept it from the log."""
        found: list[dict[str, Any]] = [{}]
        if self.is_main:
            records = read(self.path / directory.LOG)
            found = [record for record in records if record["step"] == step][:1] or found
        broadcast_object_list(found)
        return found[0]

    def judged(
        self, step: int, record: Mapping[str, Any], found: Mapping[str, float], knn: float | None
    ) -> None:
        """Complete the log's last line, `record`, by what was `found` after `step`.

        Where `knn` is the best accuracy so far and the step was saved, `best` points at it once it is whole.

        Raises:
            UserError: on every process alike, where the log can't be written.
        """
        if step == self._saved_step and self._is_best(knn) and self.is_main:
            self._writer.point_best_at(step)
        with failing_together():
            if self._log is not None:
                self._log.complete({"step": step, **record, **found})
        if self.config.log.trackers:
            self.accelerator.log(dict(found), step=step)

    def remember(self, knn: float | None) -> None:
        """Take note of the accuracy of the step that the run goes on from.

        If it is the best, `best` points at it again, as a kill may have come between the log's line and that;
        no checkpoint is dropped before the next one is saved.
        """
        if self._is_best(knn) and self.is_main:
            self._writer.point_best_at(self._saved_step, drops_old=False)

    def _is_best(self, knn: float | None) -> bool:
        """Whether an accuracy is the best so far, which it then is."""
        is_best = knn is not None and (self.best is None or knn >= self.best)
        self.best = knn if is_best else self.best
        return is_best

    def _keeps(self, epoch: int, step: int) -> bool:
        """Whether the checkpoint of `step` is the first since `epoch` that is to be kept for good."""
        every = self.config.train.keep_every
        return every > 0 and self.course.at(step).epoch // every > epoch // every

    def checkpoint(self, step: int, method: SelfDistillation, optimizer: Optimizer) -> None:
        """Save after `step` finished steps.

        It is copied now and written while training goes on.

        Raises:
            UserError: on every process alike, where the one before could not be written.
        """
        is_kept = self._keeps(self.course.at(self._saved_step).epoch, step)
        self._saved_step = step
        with failing_together(), patiently():
            if self.is_main:
                self._writer.wait()  # before the next is gathered: host memory holds one at a time
        states, are_copies = sharding.gathered(method, optimizer, self.is_main), sharding.is_applied(method)
        with failing_together():
            if self.is_main:
                self._writer.write(self._content(step, states, is_kept), are_copies)

    def _content(self, step: int, states: Mapping[str, Any], is_kept: bool) -> checkpoints.Checkpoint:
        """What is saved; without sharding, still shared with training."""
        scaler = self.accelerator.scaler
        return checkpoints.Checkpoint(
            **states,
            trainer={
                **asdict(self.course.at(step)),
                **self.facts,
                "best": self.best,
                "kept": is_kept,
                "scaler": scaler.state_dict() if scaler is not None else None,
                "torch": torch.__version__,
            },
            config=(self.path / directory.CONFIG).read_text(encoding="utf-8"),
            judged=dict(self._judged),  # the next evaluation may come before it is written
        )

    def put_aside(self, step: int, method: SelfDistillation, optimizer: Optimizer) -> bool:
        """Save the state after `step` finished steps where no run goes on from it: this one fails now.

        All processes call this together. Returns, to all, whether it could be written.
        """
        with failing_together(), patiently():
            if self.is_main:
                self._writer.give_up()  # as in `checkpoint`, host memory holds one at a time
        states, is_saved = sharding.gathered(method, optimizer, self.is_main), False
        with failing_together(), patiently():
            if self.is_main:
                content = self._content(step, states, is_kept=False)
                own = content if sharding.is_applied(method) else content.copied()
                is_saved = saved_aside(own, self.path / directory.ASIDE)
        return any(everyones([is_saved]))

    def check(self) -> None:
        """Now and then: a checkpoint that can't be written ends the run before the next one is due.

        Raises:
            UserError: on every process alike.
        """
        with failing_together():
            self._writer.check()

    def close(self, failed: bool = False) -> None:
        """End the checkpoints, the log and the trackers.

        The processes stay together, as results are still to be shared; those of a run that `failed`
        no longer wait for each other.

        Raises:
            UserError: on every process alike, where the last checkpoint could not be written.
        """
        try:
            if failed:
                self._writer.give_up()
            else:
                with failing_together(), patiently():
                    self._writer.wait()
        finally:
            if self._log is not None:
                self._log.close()
            for tracker in self.accelerator.trackers:
                tracker.finish()
            self.accelerator.trackers = []


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted key to value."""
    items: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            items |= flat(value, f"{prefix}{key}.")
        else:
            items[f"{prefix}{key}"] = value
    return items
