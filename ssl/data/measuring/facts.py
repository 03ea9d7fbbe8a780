"""What a set of images is like: exact sums over all of them, in memory that images don't add up in.

Every pixel counts alike, so a large image weighs more than a small one.

Shapes used below: N images measured, C channels.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from nestling.ssl.data.failures import Failure

SMALL = 96  # pixels: the side of DINO's local crops
LEVELS = np.arange(256) / 255


class Depth(NamedTuple):
    """The numbers of images of one type before they become 8 bits."""

    images: int
    low: float
    high: float

    def joined(self, other: "Depth") -> "Depth":
        """Of the images of both."""
        return Depth(self.images + other.images, min(self.low, other.low), max(self.high, other.high))


@dataclass
class Facts:
    """Sums over images; those of parts are joined to those of the whole.

    Shape:
        levels: (C, 256) int64, how many pixels of a channel have each of its 256 values
        indices, sizes, digests: lists of (n,) int64, (n, 2) int32 height and width, and (n, 2) uint64
    """

    levels: np.ndarray
    indices: list[np.ndarray] = field(default_factory=list)
    sizes: list[np.ndarray] = field(default_factory=list)
    digests: list[np.ndarray] = field(default_factory=list)
    depths: dict[str, Depth] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    @staticmethod
    def none(channels: int) -> "Facts":
        """Of no images."""
        return Facts(np.zeros((channels, 256), dtype=np.int64))

    def join(self, part: "Facts") -> None:
        """Add those of other images."""
        self.levels += part.levels
        self.indices += part.indices
        self.sizes += part.sizes
        self.digests += part.digests
        self.failures += part.failures
        for kind, depth in part.depths.items():
            self.add_depth(kind, depth)

    def add_depth(self, kind: str, depth: Depth) -> None:
        """Add the numbers of images of a type."""
        self.depths[kind] = self.depths[kind].joined(depth) if kind in self.depths else depth

    def __len__(self) -> int:
        return sum(map(len, self.indices))

    def mean(self) -> np.ndarray:
        """Per channel, of pixels in [0, 1]; (C,)."""
        return self.levels @ LEVELS / self.levels.sum(axis=1)

    def std(self) -> np.ndarray:
        """The same, over all pixels, as with `numpy.std`; (C,)."""
        squares = (LEVELS - self.mean()[:, None]) ** 2
        return np.sqrt((self.levels * squares).sum(axis=1) / self.levels.sum(axis=1))

    def heights_and_widths(self) -> np.ndarray:
        """Of all images, upright; (N, 2) int32."""
        return np.concatenate([np.empty((0, 2), dtype=np.int32), *self.sizes])

    def duplicates(self) -> list[np.ndarray]:
        """The indices of images whose pixels are all the same, one rising array for each such group."""
        if not len(self):
            return []
        indices, digests = np.concatenate(self.indices), np.concatenate(self.digests)
        order = np.lexsort((indices, digests[:, 1], digests[:, 0]))
        is_first = np.ones(len(order) + 1, dtype=bool)  # of a group; the end begins one too
        is_first[1:-1] = (np.diff(digests[order], axis=0) != 0).any(axis=1)
        bounds = np.flatnonzero(is_first)
        several = np.flatnonzero(np.diff(bounds) > 1)
        groups = [indices[order[bounds[group] : bounds[group + 1]]] for group in several]
        return sorted(groups, key=_first)


def _first(group: np.ndarray) -> int:
    return int(group[0])


def suggested_window(depths: dict[str, Depth]) -> list[float] | None:
    """From the smallest to the largest value, where images of more than 8 bits fill their range little.

    The range is that of the type; for floats 0 … 1, for integers of more than 16 bits 0 … 65535. Images
    with values beyond it are scaled one by one, each by its own range, which a window ends as well.
    """
    if not depths:
        return None
    low, high = min(depth.low for depth in depths.values()), max(depth.high for depth in depths.values())
    ranges = [_range_of(kind) for kind in depths]
    fills = any(high - low >= (end - start) / 2 for start, end in ranges)
    beyond = any(
        depth.low < start or depth.high > end
        for depth, (start, end) in zip(depths.values(), ranges, strict=True)
    )
    if low == high or (fills and not beyond):
        return None
    return [low, high]


def _range_of(kind: str) -> tuple[float, float]:
    dtype = np.dtype(kind)
    if dtype.kind == "f":
        return 0.0, 1.0
    if dtype.itemsize > 2:
        return 0.0, 65535.0
    return float(np.iinfo(dtype).min), float(np.iinfo(dtype).max)


SIDES = (32, 64, SMALL, 128, 224, 256, 384, 512, 768, 1024, 2048)
RATIOS = (1 / 4, 1 / 2, 3 / 4, 4 / 3, 2, 4)  # width / height
RATIO_NAMES = ("1/4", "1/2", "3/4", "4/3", "2", "4")


def histogram(values: np.ndarray, edges: tuple[float, ...], names: tuple[str, ...]) -> dict[str, int]:
    """How many values lie between the edges, the empty ends left out."""
    counts = np.bincount(np.searchsorted(edges, values, side="right"), minlength=len(edges) + 1)
    between = [f"{low} to {high}" for low, high in pairwise(names)]
    rows = [f"below {names[0]}", *between, f"from {names[-1]}"]
    filled = np.flatnonzero(counts)
    kept = range(filled[0], filled[-1] + 1) if len(filled) else range(0)
    return {rows[row]: int(counts[row]) for row in kept}


def size_facts(sizes: np.ndarray) -> dict[str, Any]:
    """Range and histograms of the sizes of at least one image.

    Shape:
        sizes: (N, 2), height and width
    """
    shorter = sizes.min(axis=1)
    return {
        "height": [int(sizes[:, 0].min()), int(sizes[:, 0].max())],
        "width": [int(sizes[:, 1].min()), int(sizes[:, 1].max())],
        "shorter_side": {
            "min": int(shorter.min()),
            "median": float(np.median(shorter)),
            "max": int(shorter.max()),
            "histogram": histogram(shorter, SIDES, tuple(map(str, SIDES))),
        },
        "width_over_height": histogram(sizes[:, 1] / sizes[:, 0], RATIOS, RATIO_NAMES),
        f"shorter_side_below_{SMALL}": int((shorter < SMALL).sum()),
    }
