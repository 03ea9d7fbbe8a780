"""Random numbers that depend on coordinates, never on a worker's own state.

A counter-based generator (Salmon et al., 2011) maps a key and a counter to random bits. The key
holds the seed and the stream, the counter the coordinates, so that different coordinates give
numbers that never overlap, in any process and in any order. Making a generator costs about 10 µs.
"""

from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """What a draw is for: the first coordinate, so that no two uses share numbers."""

    ORDER = 0  # epoch
    VIEWS = 1  # epoch, index
    SIZES = 2  # step
    HOLDOUT = 3  # no further coordinate
    TILES = 4  # photograph, part
    NETWORK = 5  # step, process
    REPLACEMENT = 6  # pass, index
    PROBE = 7  # what for, epoch, index: of a linear probe
    SHOTS = 8  # repeat, class: training images drawn for k-NN
    ALIGNMENT = 9  # index: views compared without labels


def generator(seed: int, *coordinates: int) -> np.random.Generator:
    """A fresh generator for these coordinates: a `Stream`, then up to three numbers below 2^64.

    Missing coordinates count as 0, so a stream always takes the same number of them.
    """
    assert 1 <= len(coordinates) <= 4, f"one stream and up to three numbers, not {coordinates}"
    stream, *rest = coordinates
    key = np.array([seed, stream], dtype=np.uint64)
    # Word 0 is what the generator itself counts up: it is left free.
    counter = np.array([0, *rest, *[0] * (3 - len(rest))], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))
