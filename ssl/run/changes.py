"""What may differ between two starts of a run, and what is said of it."""

import logging
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from nestling.ssl.config import Config
from nestling.ssl.data.course import Course, Place
from nestling.ssl.errors import UserError
from nestling.ssl.names import printable
from nestling.ssl.schedules import peak_learning_rate

logger = logging.getLogger("nestling")


def facts(course: Course, config: Config, num_processes: int) -> dict[str, int]:
    """What a checkpoint records of how its steps were made up."""
    return {
        "num_images": course.num_images,
        "global_batch": course.global_batch,
        "batch_size": config.train.batch_size,
        "accumulation": config.train.accumulation,
        "num_processes": num_processes,
    }


def refuse_foreign(checkpoint: Path, trainer: Mapping[str, Any], known: Mapping[str, int]) -> None:
    """Refuse to go on from a checkpoint whose `trainer` doesn't tell all that this version needs of it.

    Raises:
        UserError: with what is missing.
    """
    needed = (*(field.name for field in fields(Place)), *known, "best", "scaler")
    missing = [name for name in needed if name not in trainer]
    if missing:
        raise UserError(
            f"{printable(checkpoint)} was written by another version of nestling, its trainer.json lacks "
            f"{', '.join(missing)}: start anew with overwrite=true, or give another out"
        )


def composition(fact: Mapping[str, int]) -> str:
    """A global batch in words, as in 8 = 4 images x 1 micro-batch x 2 processes."""
    accumulation, processes = fact["accumulation"], fact["num_processes"]
    return (
        f"{fact['global_batch']} = {fact['batch_size']} images x {accumulation} "
        f"micro-batch{'es' if accumulation > 1 else ''} x {processes} process{'es' if processes > 1 else ''}"
    )


def continued(course: Course, config: Config, now: Mapping[str, int], trainer: Mapping[str, Any]) -> Course:
    """The same course from the place on that a checkpoint's `trainer` records; changes are said.

    Raises:
        UserError: there are other images than the run began with, or its last epoch has too few left for
            a step of another batch.
    """
    run = f"the run in out={printable(config.out)}"
    if trainer["num_images"] != course.num_images:
        raise UserError(
            f"{run} began with {trainer['num_images']} training images, now there are {course.num_images}: "
            "restore them, or give another out for a new run"
        )
    course = replace(course, start=Place(**{field.name: trainer[field.name] for field in fields(Place)}))
    before = replace(course, global_batch=trainer["global_batch"])
    old, new = composition(trainer), composition(now)
    if course.num_steps == course.start.step < before.num_steps:
        raise UserError(f"{run} {too_large(course, new, now)}")
    if old != new and course.start.step < before.num_steps:
        begin = f"{run} goes on after step {course.start.step} with"
        logger.warning(f"{begin} {difference(before, course, old, new, config)}")
    return course


def too_large(course: Course, batch: str, now: Mapping[str, int]) -> str:
    """That a global batch is larger than what is left of the last epoch, and which one isn't."""
    left, parts = course.left_over, now["accumulation"] * now["num_processes"]
    size = left // parts
    largest, way = (
        (size * parts, f"train.batch_size={size}")
        if size
        else (left, "with fewer processes or less train.accumulation")
    )
    return (
        f"has {left} images left of its last epoch, too few for a step of the global batch {batch}: "
        f"the largest that still fills one is {largest} ({way})"
    )


def difference(before: Course, after: Course, old: str, new: str, config: Config) -> str:
    """What another batch, or the same one composed otherwise, means for the rest of a run."""
    left = [str(course.num_steps - course.start.step) for course in (before, after)]
    if before == after:
        return (
            f"its global batch composed otherwise: {new}, it was {old}; the steps left ({left[0]}) see the "
            "same images on the same schedules, but batch norms and drop path see other parts of them at a "
            "time, so numbers may differ"
        )
    if after.left_over and after.epoch_images is None:
        epoch = f"The last {after.left_over} images of this epoch are left out, as they fill no step"
    elif after.left_over:
        epoch = f"This epoch ends {after.left_over} images early, as they fill no step"
    else:
        epoch = "What this epoch has not seen yet comes next"
    optim = config.optim
    rates = [
        f"{peak_learning_rate(optim.lr, optim.lr_scaling, course.global_batch):.3e}"
        for course in (before, after)
    ]
    return (
        f"another global batch: {new}, it was {old}; steps per epoch {before.steps_per_epoch} -> "
        f"{after.steps_per_epoch}, steps left {' -> '.join(left)}, peak learning rate {' -> '.join(rates)} "
        f"(optim.lr_scaling={optim.lr_scaling}). {epoch}; all schedules go on by images seen"
    )
