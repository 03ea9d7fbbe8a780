"""Which head, and on which images it is chosen: a part of the training set, never the test set."""

from collections.abc import Sequence

import numpy as np
import torch

from nestling.ssl.data.sources.base import ImageSource, Subset, first_alike
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.linear.heads import HeadSpec
from nestling.ssl.evaluation.linear.scores import Scores
from nestling.ssl.randomness import Stream, generator

SPLIT = 0  # of Stream.PROBE


def split_by_class(
    labels: np.ndarray, share: float, seed: int, repeats: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Indices to learn from and indices to choose on: of each class the `share` with the smallest draws.

    At least one and never all of a class, so a class with one image is learned and not chosen on. `repeats`
    says for each row the first that is the same file; such rows stay on one side, where they share a class.

    Shape:
        labels: (N,), repeats: (N,) or None -> two rising arrays that hold each of 0 to N - 1 once
    """
    draws = generator(seed, Stream.PROBE, SPLIT).random(len(labels))
    alike = np.arange(len(labels)) if repeats is None else repeats
    order = np.lexsort((alike, draws[alike], labels))
    held = np.zeros(len(labels), dtype=bool)
    if share > 0:
        for rows in np.split(order, np.flatnonzero(np.diff(labels[order])) + 1):
            count = min(max(round(share * len(rows)), 1), len(rows) - 1)
            starts = np.flatnonzero(np.diff(alike[rows], prepend=-1))  # of each file
            held[rows[: starts[np.searchsorted(starts, count, side="right") - 1]]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def repeats_of(source: ImageSource) -> np.ndarray | None:
    """For each image the first that is the same file, None where no two are."""
    if not isinstance(source, Subset):
        return source.repeats()
    repeats = source.source.repeats()
    return None if repeats is None else first_alike(repeats[source.indices])


def best_of(specs: Sequence[HeadSpec], scores: Scores, alive: torch.Tensor) -> int:
    """The place of the head of best top-1, the first among equals; heads that are not `alive` don't count.

    Raises:
        UserError: none is.
    """
    refuse_none_alive(specs, alive)
    return int(torch.where(alive, scores.top1, -1.0).argmax())


def refuse_none_alive(specs: Sequence[HeadSpec], alive: torch.Tensor) -> None:
    """Raise UserError where all heads became NaN or infinite."""
    if not alive.any():
        raise UserError(
            f"all {len(specs)} heads became NaN or infinite, those of the smallest {specs[0].setting} "
            f"({min(spec.value for spec in specs):g}) too: the features are not finite or very large; give "
            f"smaller linear.{specs[0].setting}, or linear.standardise=true where the protocol takes it"
        )
