"""Where images come from: each source numbers its images and loads one by its number."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from nestling.ssl.data.decoding.raster import Reduction
from nestling.ssl.data.sources.identity import of_paths
from nestling.ssl.errors import UserError
from nestling.ssl.names import printable
from nestling.ssl.randomness import Stream, generator

MAX_HELD_OUT = 5000


class ImageSource(ABC):
    """Numbered images; picklable, so that it reaches loader processes however they start."""

    name: str
    labels: np.ndarray | None = None  # (N,) int64, indices into class_names
    class_names: list[str] | None = None
    passed_over: str = ""  # what was there beside the images, in words; "" where nothing was
    blocks: np.ndarray | None = None  # where stretches end that are cheap to read together (shards)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def path(self, index: int) -> str:
        """A stable name of the image, its file where it has one."""

    @abstractmethod
    def load(self, index: int, reduction: Reduction | None = None) -> np.ndarray:
        """The image, (H, W, C) uint8, upright; not to be written to.

        Where it can be decoded smaller for less, `reduction` is asked once, by how much it may be.

        Raises:
            UnreadableError: it can't be reached or decoded.
        """

    def sides(self, indices: np.ndarray) -> np.ndarray | None:
        """Shorter sides in pixels from the headers alone, 0 where unreadable; None: can't be told cheaply.

        Shape:
            indices: (n,) -> (n,) int64
        """
        return None

    def identities(self) -> np.ndarray:
        """Numbers that are equal where two images are one file, here or in another source of this process.

        Shape:
            returns: (N,) uint64
        """
        return of_paths(map(self.path, range(len(self))))

    def repeats(self) -> np.ndarray | None:
        """For each image the first one that is the same file; None: no source of this kind repeats one.

        Shape:
            returns: (N,) int64
        """
        return None


class Subset(ImageSource):
    """Some images of a source, renumbered in the order of `indices`.

    Small when pickled, as every spawned loader process gets a copy: four bytes per image up to four
    billion of them, and labels that are looked up in the source.
    """

    def __init__(self, source: ImageSource, indices: Sequence[int] | np.ndarray) -> None:
        chosen = np.asarray(indices, dtype=np.int64)
        self.name, self.passed_over = source.name, source.passed_over
        self.class_names = source.class_names
        if source.blocks is not None:  # rising indices, as all subsets here have, keep the blocks together
            self.blocks = np.searchsorted(chosen, source.blocks)
        self.source: ImageSource = source
        if isinstance(source, Subset):
            self.source, chosen = source.source, source.indices[chosen]
        self.indices: np.ndarray = chosen.astype(np.uint32 if len(self.source) <= 1 << 32 else np.int64)

    @property
    def labels(self) -> np.ndarray | None:  # type: ignore[override]  # nothing assigns it from outside
        """Those of the source."""
        return None if self.source.labels is None else self.source.labels[self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def path(self, index: int) -> str:
        return self.source.path(int(self.indices[index]))

    def load(self, index: int, reduction: Reduction | None = None) -> np.ndarray:
        return self.source.load(int(self.indices[index]), reduction)

    def sides(self, indices: np.ndarray) -> np.ndarray | None:
        return self.source.sides(self.indices[indices])


def holdout(source: ImageSource, share: float, seed: int) -> tuple[Subset, Subset]:
    """Split into a part to train on and a part to judge with, of 1 to 5000 images.

    More would not tell more, and cost training images and time. Every index has its own draw; the
    `share` with the smallest draws is held out. So an image added at the end moves at most one other.
    The rows of a list that name one file share a draw, and stay together.

    Raises:
        UserError: fewer than two images.
    """
    count = len(source)
    if share == 0:
        return Subset(source, np.arange(count)), Subset(source, [])
    draws, repeats = generator(seed, Stream.HOLDOUT).random(count), _repeats(source)
    distinct = count if repeats is None else len(np.unique(repeats))
    if distinct < 2:
        raise UserError(
            f"{printable(source.name)}: {distinct} image can't be split by data.holdout={share}; set it to 0"
        )
    num_held = min(max(round(share * count), 1), count - 1, MAX_HELD_OUT)
    if repeats is None:
        order = np.argsort(draws, kind="stable")
    else:
        order = np.lexsort((repeats, draws[repeats]))
        starts = np.flatnonzero(np.diff(repeats[order])) + 1  # of each file but the first
        num_held = starts[max(np.searchsorted(starts, num_held, side="right") - 1, 0)]
    held = np.zeros(count, dtype=bool)
    held[order[:num_held]] = True
    return Subset(source, np.flatnonzero(~held)), Subset(source, np.flatnonzero(held))


def _repeats(source: ImageSource) -> np.ndarray | None:
    """Those of a source; of a subset, within it."""
    if not isinstance(source, Subset):
        return source.repeats()
    repeats = source.source.repeats()
    return None if repeats is None else first_alike(repeats[source.indices])


def first_alike(values: np.ndarray) -> np.ndarray | None:
    """For each value the place of the first one equal to it; None where all differ.

    Shape:
        values: (N,) -> (N,) int64
    """
    distinct, first, number = np.unique(values, return_index=True, return_inverse=True)
    return None if len(distinct) == len(values) else first[number]


def evenly(num_images: int, at_most: int | None) -> np.ndarray:
    """Indices of at most that many images, evenly spread over all."""
    if at_most is None or at_most >= num_images:
        return np.arange(num_images)
    return np.arange(at_most, dtype=np.int64) * num_images // at_most
