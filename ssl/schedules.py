"""Learning rate, weight decay, teacher momentum and temperature as pure functions of the step.

A step may be a fraction: after a change of the global batch a run stands between two steps of the new one.
Every schedule is defined for every step from 0 on and keeps its last value past the end, so a
warm-up as long as the training, a training of one step and a resumed run need no special case.
Nothing here is stateful: a scheduler that counts its own calls advances once per process.
"""

import math
from dataclasses import dataclass

from nestling.ssl.config import Config
from nestling.ssl.data.course import Course

REFERENCE_BATCH = 256  # the global batch that a base learning rate is meant for (Goyal et al., 2017)


def cosine_at(step: float, num_steps: int, start: float, end: float) -> float:
    """end + (start - end) * (1 + cos(pi * step / num_steps)) / 2, and `end` from `num_steps` on."""
    if step >= num_steps:
        return end
    return end + (start - end) * (1 + math.cos(math.pi * step / num_steps)) / 2


def linear_at(step: float, num_steps: int, start: float, end: float) -> float:
    """From `start` at step 0 to `end` at `num_steps` and after."""
    if step >= num_steps:
        return end
    return start + (end - start) * step / num_steps


def warmup_cosine_at(step: float, num_steps: int, num_warmup: int, peak: float, end: float) -> float:
    """Linear from peak / num_warmup to peak, then cosine to `end`.

    DINO warms up from exactly 0; starting one increment later loses no step to a rate of 0,
    which matters where an epoch is a single step.
    """
    if step < num_warmup:
        return peak * min(step + 1, num_warmup) / num_warmup
    return cosine_at(step - num_warmup, num_steps - num_warmup, peak, end)


def peak_learning_rate(lr: float, scaling: str, global_batch: int) -> float:
    """The base rate `lr` scaled to `global_batch`: linear (Goyal et al., 2017), sqrt or none."""
    ratio = global_batch / REFERENCE_BATCH
    return {"linear": lr * ratio, "sqrt": lr * math.sqrt(ratio), "none": lr}[scaling]


@dataclass(frozen=True)
class StepValues:
    """What the schedules say for one step."""

    lr: float
    weight_decay: float
    momentum: float
    temperature: float
    last_layer_frozen: bool
    backbone_frozen: bool


@dataclass(frozen=True)
class Schedules:
    """All schedules of a run, by the images that it has seen on its course."""

    config: Config
    course: Course

    @property
    def num_steps(self) -> int:
        """All steps of the run."""
        return self.course.num_steps

    @property
    def peak_lr(self) -> float:
        optim = self.config.optim
        return peak_learning_rate(optim.lr, optim.lr_scaling, self.course.global_batch)

    def steps_in(self, epochs: float) -> int:
        """A length given in epochs, in steps."""
        return round(epochs * self.course.steps_per_epoch)

    @property
    def backbone_freeze_epochs(self) -> float:
        """A fresh head sends noise into the backbone, so weights that are already good wait for it."""
        given = self.config.backbone.freeze_epochs
        if given is not None:
            return given
        return min(1.0, self.config.train.epochs / 10) if self.config.init_from else 0.0

    def at(self, step: int) -> StepValues:
        """The values of a step, counted from 0; past the end, the last ones."""
        optim, teacher = self.config.optim, self.config.teacher
        total, position = self.steps_in(self.config.train.epochs), self.course.position_at(step)
        temperature_warmup = self.steps_in(teacher.temperature_warmup_epochs)
        return StepValues(
            lr=warmup_cosine_at(
                position, total, self.steps_in(optim.warmup_epochs), self.peak_lr, optim.lr_end
            ),
            weight_decay=cosine_at(position, total, optim.weight_decay, optim.weight_decay_end),
            momentum=cosine_at(position, total, teacher.momentum, teacher.momentum_end),
            temperature=linear_at(
                position, temperature_warmup, teacher.temperature_start, teacher.temperature
            ),
            last_layer_frozen=position < self.steps_in(self.config.head.freeze_epochs),
            backbone_frozen=position < self.steps_in(self.backbone_freeze_epochs),
        )
