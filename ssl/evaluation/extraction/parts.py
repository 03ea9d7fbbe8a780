"""What an extraction has computed so far: finished parts, each a file of its own.

A part is a stretch of the dataset and appears whole or not at all, so an extraction that was stopped at any
instant goes on with the parts that are missing, on any number of processes. Batches begin at the same
images whatever the parts, so the numbers are the same too.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from nestling.ssl.data.failures import Failure
from nestling.ssl.run.disk import replaced, share

FOLDER = ".extracting"
PLAN = "plan.json"
INDICES = "indices"
MOST_IMAGES, MOST_BYTES = 1024, 64 * 2**20  # of a part, where nobody says


def part_size(asked: int | None, num_images: int, row_bytes: int, batch_size: int, num_processes: int) -> int:
    """Images of a part: whole batches; where nobody says at most 64 MB, and several parts per process."""
    share_of_each = -(-num_images // (4 * num_processes))
    wanted = asked or max(1, min(MOST_IMAGES, MOST_BYTES // row_bytes, share_of_each))
    return -(-wanted // batch_size) * batch_size


@dataclass(frozen=True)
class Parts:
    """The parts of an extraction of `num_images` images into the folder `out`, `size` images each."""

    out: Path
    num_images: int
    size: int

    @property
    def numbers(self) -> range:
        """All parts there will be."""
        return range(-(-self.num_images // self.size))

    def images(self, number: int) -> range:
        """The images of a part, as the dataset numbers them."""
        return range(number * self.size, min((number + 1) * self.size, self.num_images))

    def file(self, number: int) -> Path:
        """Where a part lies."""
        return self.out / FOLDER / f"part_{number:08d}.safetensors"

    def missing(self) -> list[int]:
        """The parts that are not there, or damaged."""
        return [number for number in self.numbers if not self._is_whole(number)]

    def write(
        self, number: int, indices: np.ndarray, rows: dict[str, np.ndarray], failures: Sequence[Failure]
    ) -> None:
        """Save a part.

        Raises:
            UserError: it can't be written.
        """
        said = json.dumps([tuple(failure) for failure in failures])
        with replaced(self.file(number)) as draft:
            save_file({INDICES: indices, **rows}, draft, {"failures": said})
            share(draft)

    def indices(self, number: int) -> np.ndarray:
        """The images of a part that could be read.

        Shape:
            (m,) int64, rising
        """
        with safe_open(self.file(number), "np") as part:
            return part.get_tensor(INDICES)

    def failures(self, number: int) -> list[Failure]:
        """The images of a part that could not."""
        with safe_open(self.file(number), "np") as part:
            return [Failure(*said) for said in json.loads(part.metadata()["failures"])]

    def rows(self, pooling: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Of each part the images and their rows, in the order of the dataset, one part in memory."""
        for number in self.numbers:
            with safe_open(self.file(number), "np") as part:
                yield part.get_tensor(INDICES), part.get_tensor(pooling)

    def _is_whole(self, number: int) -> bool:
        try:
            with safe_open(self.file(number), "np") as part:  # holds the length against the header
                return INDICES in part.keys()  # noqa: SIM118  # it is no mapping
        except (OSError, SafetensorError):
            return False
