"""How good are the features where few training images are labelled? n of each class, drawn several times.

Shapes used below: N training images that were read, C classes.
"""

import logging
from collections.abc import Iterator, Sequence
from statistics import fmean, stdev

import numpy as np
import torch
from torch import Tensor

from nestling.ssl.randomness import Stream, generator

log = logging.getLogger("nestling")


def drawn(labels: Tensor, shots: int, repeat: int, seed: int) -> Tensor:
    """Places of that many images of each class, of all where a class has fewer, rising.

    A function of the seed, the repeat and the labels alone; more shots contain fewer ones.

    Shape:
        labels: (N,) -> at most (shots * C,)
    """
    numbers = labels.numpy()
    by_class = np.argsort(numbers, kind="stable")
    kinds, starts = np.unique(numbers[by_class], return_index=True)
    chosen = [
        members[generator(seed, Stream.SHOTS, repeat, int(kind)).permutation(len(members))[:shots]]
        for kind, members in zip(kinds, np.split(by_class, starts[1:]), strict=True)
    ]
    return torch.from_numpy(np.sort(np.concatenate(chosen)))


def draws(labels: Tensor, shots: Sequence[int], repeats: int, seed: int) -> Iterator[tuple[int, Tensor]]:
    """Every draw: the shots and the places. Classes that have fewer images are counted once, in the log."""
    sizes = torch.bincount(labels)
    sizes = sizes[sizes > 0]
    few = int((sizes < max(shots)).sum())
    if few:
        log.warning(
            "k-NN: %d of %d classes have fewer than %d training images, the smallest %d: all of those vote",
            few,
            len(sizes),
            max(shots),
            int(sizes.min()),
        )
    for number in dict.fromkeys(shots):
        for repeat in range(repeats):
            yield number, drawn(labels, number, repeat, seed)


def summary(repeats: Sequence[dict[str, float]]) -> dict[str, dict[str, float | None]]:
    """Mean and standard deviation (of a sample) of each accuracy over the repeats."""
    return {
        name: {
            "mean": fmean(result[name] for result in repeats),
            "std": stdev(result[name] for result in repeats) if len(repeats) > 1 else None,
        }
        for name in repeats[0]
    }
