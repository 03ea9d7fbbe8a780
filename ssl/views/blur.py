"""Gaussian blur as Pillow's `GaussianBlur` defines it, which the published augmentation uses.

It is three passes of an extended box filter along each axis (Gwosdek et al., 2011): a box of
2 l + 1 pixels with a weight a < 1 on the two pixels beside it, whose variance adds up to sigma^2;
beyond the border the outermost pixel repeats, anew at each pass. Pillow rounds after each pass.
"""

import math
from functools import lru_cache

import numpy as np

PASSES = 3
SMALL = 48  # up to this side, one matrix product is faster than shifted sums


def gaussian_blur(planes: np.ndarray, sigma: float) -> np.ndarray:
    """Blur along height and width.

    Shape:
        planes: (..., S, S) float32 -> the same
    """
    reach, edge = extended_box(sigma)
    side = planes.shape[-1]
    if side <= SMALL or side <= 2 * (reach + 1):
        matrix = _pass_matrix(side, reach, edge)
        matrix = matrix @ matrix @ matrix
        return matrix @ planes @ matrix.T
    for axis in (-1, -2):
        for _ in range(PASSES):
            planes = _box_pass(planes, axis, reach, edge)
    planes *= np.float32((2 * (reach + edge) + 1) ** (-2 * PASSES))
    return planes


def extended_box(sigma: float) -> tuple[int, float]:
    """The l and a of the box of which `PASSES` passes have the variance sigma^2."""
    variance = sigma * sigma / PASSES
    reach = int((math.sqrt(12 * variance + 1) - 1) / 2)
    edge = (2 * reach + 1) * (reach * (reach + 1) - 3 * variance) / (6 * (variance - (reach + 1) ** 2))
    return reach, edge


def _box_pass(planes: np.ndarray, axis: int, reach: int, edge: float) -> np.ndarray:
    """One pass without its division by the sum of the weights."""
    total = _pair(planes, axis, reach + 1)
    total *= np.float32(edge)
    for distance in range(1, reach + 1):
        total += _pair(planes, axis, distance)
    total += planes
    return total


def _pair(planes: np.ndarray, axis: int, distance: int) -> np.ndarray:
    """x[i - d] + x[i + d] along an axis, indices held within the border."""
    total = np.empty_like(planes)
    x, y = (planes, total) if axis == -1 else (planes.swapaxes(-1, -2), total.swapaxes(-1, -2))
    np.add(x[..., : -2 * distance], x[..., 2 * distance :], out=y[..., distance:-distance])
    np.add(x[..., :1], x[..., distance : 2 * distance], out=y[..., :distance])
    np.add(x[..., -1:], x[..., -2 * distance : -distance], out=y[..., -distance:])
    return total


def _pass_matrix(side: int, reach: int, edge: float) -> np.ndarray:
    """One pass as a matrix (side, side)."""
    matrix = _pair_matrix(side, reach + 1) * np.float32(edge)
    for distance in range(1, reach + 1):
        matrix += _pair_matrix(side, distance)
    matrix.flat[:: side + 1] += 1
    matrix /= np.float32(2 * (reach + edge) + 1)
    return matrix


@lru_cache(maxsize=256)
def _pair_matrix(side: int, distance: int) -> np.ndarray:
    matrix = np.zeros((side, side), dtype=np.float32)
    here = np.arange(side)
    for there in (here - distance, here + distance):
        np.add.at(matrix, (here, there.clip(0, side - 1)), 1)
    return matrix
