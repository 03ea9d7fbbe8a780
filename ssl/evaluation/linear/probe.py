"""The whole of a linear probe: split the training images, train a grid, choose a head, test it.

Shapes used below: C classes, D channels of a read-out.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from nestling.ssl.distributed import failing_together, is_main, patiently
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.linear.choice import best_of, refuse_none_alive, repeats_of, split_by_class
from nestling.ssl.evaluation.linear.heads import HeadGrid, HeadSpec
from nestling.ssl.evaluation.linear.scores import TOP, Scores
from nestling.ssl.evaluation.linear.task import Task

log = logging.getLogger("nestling")


class Learner(Protocol):
    """A way of training heads: `augmented.Augmented`, `cached.Cached`, `cached.Logistic`.

    `together` says whether all processes must call it, or the main one alone.
    """

    setting: str
    together: bool

    def values(self) -> Sequence[float]:
        """Of the setting, in the grid."""

    def fit(self, specs: Sequence[HeadSpec], indices: np.ndarray) -> HeadGrid:
        """Heads trained on those training images."""

    def score(self, grid: HeadGrid, side: str, indices: np.ndarray) -> Scores:
        """Their accuracies on those images of a side, train or val."""


@dataclass
class Outcome:
    """The chosen head, what it was chosen on and what it reaches on the test images.

    Shape:
        weight: (C, D), bias: (C,)
    """

    chosen: HeadSpec
    weight: Tensor
    bias: Tensor
    top1: float
    top5: float | None  # None with five classes or fewer, of which it would say nothing
    chosen_on: str
    heads: list[dict[str, Any]]
    facts: dict[str, Any]


def probed(learner: Learner, task: Task) -> Outcome | None:
    """Probe on the processes that the learner needs; None on the others, errors on all."""
    outcome = None
    with failing_together(), patiently():
        if learner.together or is_main():
            outcome = probe(learner, task)
    return outcome


def probe(learner: Learner, task: Task) -> Outcome:
    """Train all heads on a part of the training images, choose on the rest of them, test on `task.val`.

    Raises:
        UserError: all heads became NaN, or nothing is there to choose on.
    """
    specs = [
        HeadSpec(wanted.name, learner.setting, value)
        for wanted in task.readouts
        for value in dict.fromkeys(learner.values())
    ]
    learned, held = split_by_class(
        task.train_labels, task.settings.holdout, task.settings.seed, repeats_of(task.train)
    )
    _check_split(task, len(specs), len(held))
    everything = np.arange(len(task.train))
    tested = np.arange(len(task.val))
    grid = learner.fit(specs, learned)
    refuse_none_alive(grid.specs, grid.finite())  # before the passes that score them
    chosen_on = learner.score(grid, "train", held) if len(held) else None
    test = learner.score(grid, "val", tested)
    alive = grid.finite() & (chosen_on or test).finite
    best = best_of(grid.specs, chosen_on or test, alive)  # of one head where `test` stands in
    _name_dropped(grid.specs, alive.tolist())
    spec = grid.specs[best]
    final, score, place, refit = grid, test, best, len(held) > 0 and _refits(task, learner)
    if refit:
        final = learner.fit([spec], everything)
        score, place = learner.score(final, "val", tested), 0
        best_of(final.specs, score, final.finite() & score.finite)
    weight, bias = final.one(spec)
    shows_five = len(np.unique(task.train_labels)) > TOP
    return Outcome(
        chosen=spec,
        weight=weight,
        bias=bias,
        top1=float(score.top1[place]),
        top5=float(score.top5[place]) if shows_five else None,
        chosen_on=_said(task, chosen_on, refit),
        heads=_listed(grid.specs, alive.tolist(), chosen_on, test, shows_five),
        facts={
            "num_learned": _readable(task, learned),
            "num_chosen_on": chosen_on.num_images if chosen_on else 0,
            "num_test": score.num_images,
            "refit_on_all": refit,
            "dropped": [str(each) for each, ok in zip(grid.specs, alive.tolist(), strict=True) if not ok],
        },
    )


def _check_split(task: Task, num_heads: int, num_held: int) -> None:
    """Raise UserError where there are heads to choose from and no image to choose on."""
    share = task.settings.holdout
    if num_heads > 1 and share == 0:
        raise UserError(
            f"linear.holdout=0 leaves no image to choose one of {num_heads} heads on, and the test "
            "images are not for that; set it to 0.1, or give one read-out and one value, as in "
            "linear.readouts='[cls]' linear.lr='[0.001]'"
        )
    if share > 0 and num_held == 0:
        raise UserError(
            f"linear.holdout={share} finds no class with two images or more in data.train; give more images "
            "of a class, or one head and linear.holdout=0"
        )


def _readable(task: Task, indices: np.ndarray) -> int:
    """How many of those training images could be read."""
    unreadable = set(task.ledger.paths())
    return len(indices) - (sum(task.train.path(int(i)) in unreadable for i in indices) if unreadable else 0)


def _refits(task: Task, learner: Learner) -> bool:
    return not learner.together if task.settings.refit is None else task.settings.refit


def _name_dropped(specs: Sequence[HeadSpec], alive: Sequence[bool]) -> None:
    dropped = [str(spec) for spec, ok in zip(specs, alive, strict=True) if not ok]
    if dropped:
        log.warning(
            "%d of %d heads became NaN or infinite and are left out: %s",
            len(dropped),
            len(specs),
            ", ".join(dropped),
        )


def _said(task: Task, scores: Scores | None, refit: bool) -> str:
    """In words, what the head was chosen on."""
    if scores is None:
        return "nothing: it is the only head, trained on all training images"
    share = f"{scores.num_images} images held out of data.train ({task.settings.holdout:g} of each class)"
    return f"{share}, then trained anew on all training images" if refit else share


def _listed(
    specs: Sequence[HeadSpec], alive: Sequence[bool], chosen_on: Scores | None, test: Scores, five: bool
) -> list[dict[str, Any]]:
    """Every head with what it reached before any refit; a dropped one has no accuracy."""
    listed = []
    for place, (spec, ok) in enumerate(zip(specs, alive, strict=True)):
        shares = {"held_out_top1": chosen_on.top1 if chosen_on else None, "test_top1": test.top1}
        shares |= {"test_top5": test.top5} if five else {}
        listed.append(
            {
                "readout": spec.readout,
                spec.setting: spec.value,
                "dropped": not ok,
                **{
                    name: float(share[place]) if ok and share is not None else None
                    for name, share in shares.items()
                },
            }
        )
    return listed
