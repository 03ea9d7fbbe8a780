"""What takes the place of an image that can't be read."""

from typing import NamedTuple

import numpy as np

from nestling.ssl.config import Data
from nestling.ssl.data.decoding.raster import Reduction
from nestling.ssl.data.failures import Failure, UnreadableError
from nestling.ssl.data.order import SampleRef
from nestling.ssl.data.sources.base import ImageSource, evenly
from nestling.ssl.errors import UserError
from nestling.ssl.names import printable
from nestling.ssl.randomness import Stream, generator

TRIES = 20  # other images drawn in the place of one: with half of all unreadable, all fail once in a million


class Read(NamedTuple):
    """An image (H, W, C) uint8, None where it can't be read, and every failure on the way.

    `size` is the height and width it has where it isn't decoded smaller.
    """

    image: np.ndarray | None
    failures: list[Failure]
    size: tuple[int, int] = (0, 0)


class Reader:
    """Reads the images of a source as `data.on_error` says: past the unreadable ones, or not.

    It remembers what is missing or could not be decoded, for which there is no second try; a disk or a
    network may recover.

    Raises, from its methods:
        UserError: an unreadable image and `data.on_error=raise`.
    """

    def __init__(self, source: ImageSource, data: Data) -> None:
        self.source, self.on_error = source, data.on_error
        self._lasting: dict[int, Failure] = {}

    def read(self, index: int, reduction: Reduction | None = None) -> Read:
        """One image, which may be smaller as `reduction` allows, or its failure."""
        if index in self._lasting:
            return Read(None, [self._lasting[index]])
        try:
            return self._loaded(index, reduction)
        except UnreadableError as problem:
            if self.on_error == "raise":
                raise UserError(
                    f"{problem}; repair or remove it, or set data.on_error=skip to go on without"
                ) from problem
            failure = Failure(index, problem.path, problem.reason)
            if not problem.transient:
                self._lasting[index] = failure
            return Read(None, [failure])

    def _loaded(self, index: int, reduction: Reduction | None) -> Read:
        if reduction is None:
            image = self.source.load(index)
            return Read(image, [], image.shape[:2])
        sizes: list[tuple[int, int]] = []

        def noted(height: int, width: int) -> int:
            sizes.append((height, width))
            return reduction(height, width)

        image = self.source.load(index, noted)
        return Read(image, [], sizes[0] if sizes else image.shape[:2])

    def read_or_replace(self, ref: SampleRef, seed: int, reduction: Reduction | None = None) -> Read:
        """One image, or the first readable one of others drawn for (seed, pass, index).

        Raises:
            UserError: none of them can be read.
        """
        image, failures, size = self.read(ref.image, reduction)
        others = generator(seed, Stream.REPLACEMENT, ref.pass_, ref.image)
        while image is None:
            if len(failures) > TRIES:
                raise UserError(self.all_bad(failures))
            image, more, size = self.read(int(others.integers(len(self.source))), reduction)
            failures += more
        return Read(image, failures, size)

    def all_bad(self, failures: list[Failure]) -> str:
        """What to say where all that was tried failed."""
        distinct = list({failure.path: failure for failure in failures}.values())
        return (
            f"none of {len(distinct)} images tried, of {len(self.source)} in {printable(self.source.name)}, "
            f"can be read; first failures: {'; '.join(map(str, distinct[:3]))}"
        )


def refuse_if_none_reads(source: ImageSource, data: Data) -> None:
    """Read a few images, evenly chosen, up to the first good one: what is wrong with all shows at once.

    Raises:
        UserError: none of them can be read, or one can't and `data.on_error=raise`.
    """
    reader, failures = Reader(source, data), list[Failure]()
    for index in evenly(len(source), TRIES).tolist():
        image, failed, _ = reader.read(index)
        if image is not None:
            return
        failures += failed
    if failures:
        raise UserError(reader.all_bad(failures))
