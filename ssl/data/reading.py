"""What takes the place of an image that can't be read."""

from typing import NamedTuple

import numpy as np

from nestling.ssl.config import Data
from nestling.ssl.data.failures import Failure, UnreadableError
from nestling.ssl.data.order import SampleRef
from nestling.ssl.data.sources.base import ImageSource, evenly
from nestling.ssl.errors import UserError
from nestling.ssl.names import printable
from nestling.ssl.randomness import Stream, generator

TRIES = 20  # other images drawn in the place of one: with half of all unreadable, all fail once in a million


class Read(NamedTuple):
    """An image (H, W, C) uint8, None where it can't be read, and every failure on the way."""

    image: np.ndarray | None
    failures: list[Failure]


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

    def read(self, index: int) -> Read:
        """One image or its failure."""
        if index in self._lasting:
            return Read(None, [self._lasting[index]])
        try:
            return Read(self.source.load(index), [])
        except UnreadableError as problem:
            if self.on_error == "raise":
                raise UserError(
                    f"{problem}; repair or remove it, or set data.on_error=skip to go on without"
                ) from problem
            failure = Failure(index, problem.path, problem.reason)
            if not problem.transient:
                self._lasting[index] = failure
            return Read(None, [failure])

    def read_or_replace(self, ref: SampleRef, seed: int) -> Read:
        """One image, or the first readable one of others drawn for (seed, pass, index).

        Raises:
            UserError: none of them can be read.
        """
        image, failures = self.read(ref.image)
        others = generator(seed, Stream.REPLACEMENT, ref.pass_, ref.image)
        while image is None:
            if len(failures) > TRIES:
                raise UserError(self.all_bad(failures))
            image, more = self.read(int(others.integers(len(self.source))))
            failures += more
        return Read(image, failures)

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
        image, failed = reader.read(index)
        if image is not None:
            return
        failures += failed
    if failures:
        raise UserError(reader.all_bad(failures))
