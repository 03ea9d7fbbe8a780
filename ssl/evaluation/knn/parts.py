"""The unit rows of the images that fall to this process: in memory, or as float16 in a mapped file.

Shapes used below: n readable images of this process, D channels, B images of a batch.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from nestling.backbones import Backbone
from nestling.ssl.data.failures import Failure
from nestling.ssl.data.workers import deaths_explained
from nestling.ssl.distributed import everyones, failing_together
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.features import Batches, forward, in_dataset_order, untouched
from nestling.ssl.evaluation.knn.exact import moments, spread, unit_rows
from nestling.ssl.evaluation.readouts import readout
from nestling.ssl.names import printable

SHOWN = 5  # paths in a message


class Part(NamedTuple):
    """Rows of this process and the images they belong to.

    Shape:
        indices: (n,) int64, of the dataset, rising; rows: (n, D); files: (n,), equal for one file
    """

    indices: Tensor
    rows: Tensor
    files: Tensor | None = None

    def chosen(self, indices: Tensor) -> "Part":
        """Those of its images that are among some of the dataset."""
        return self.at(torch.isin(self.indices, indices).nonzero().flatten())

    def at(self, places: Tensor) -> "Part":
        """Those at some places of this process."""
        files = None if self.files is None else self.files[places]
        return Part(self.indices[places], self.rows[places], files)


@dataclass(frozen=True)
class Vectors:
    """A side of the comparison: this process's part for each pooling, and what is known of the whole.

    `readable` are the images of the dataset that were read, `failures` the others, of all processes; `zero`
    names the images whose vector is zero, `spreads` the largest deviation of a channel.
    """

    parts: dict[str, Part]
    readable: Tensor
    failures: list[Failure]
    zero: dict[str, list[str]]
    spreads: dict[str, float]


@contextmanager
def scratch(folder: str | None) -> Iterator[Path | None]:
    """A folder of this process's own in that one, gone afterwards; None for None.

    Raises, on all processes:
        UserError: it can't be made.
    """
    with ExitStack() as stack:
        if folder is None:
            yield None
            return
        with failing_together():
            try:
                place = Path(folder).expanduser()
                place.mkdir(parents=True, exist_ok=True)
                own = stack.enter_context(tempfile.TemporaryDirectory(prefix="knn-", dir=place))
            except OSError as error:
                raise _unwritable(folder, error) from error
        yield Path(own)


def vectors_of(
    backbone: Backbone,
    batches: Batches,
    num_images: int,
    poolings: Sequence[str],
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device,
    path: Callable[[int], str],
    key: str,
    files: Tensor | None = None,
    folder: Path | None = None,
) -> Vectors:
    """One pass over the images of this process, whose rows go to `folder` where there is one.

    `path` names an image of `key`, `files` numbers those of the dataset.

    Raises, on all processes:
        UserError: vectors that are not finite, a full disk, or what `batches` raise.
    """
    seen = _Seen(poolings, folder)
    failures: list[Failure] = []
    with untouched(backbone), failing_together(), deaths_explained(), torch.no_grad():
        backbone.eval()
        readouts = [readout(name) for name in poolings]
        for images, vectors, failed in forward(backbone, batches, readouts, mean, std, device):
            failures += failed
            seen.add(images, vectors, path)
    indices = torch.cat(seen.indices)
    assert bool((indices.diff() > 0).all()), "a loader goes through its share in the dataset's order"
    told = everyones([(seen.faulty, seen.zero, seen.sums)])
    for name in poolings:
        refuse_nonfinite(name, [path for faults, _, _ in told for path in faults[name]], key)
    whole = {name: [part[name] for _, _, part in told if name in part] for name in poolings}
    own = None if files is None else files[indices]
    parts = {
        name: Part(indices, store.rows(whole[name][0].shape[1] if whole[name] else 0), own)
        for name, store in seen.stores.items()
    }
    failures = in_dataset_order(indices, {}, failures, num_images, device).failures  # each image once
    return Vectors(
        parts,
        _readable(failures, num_images),
        failures,
        {name: [path for _, zeros, _ in told for path in zeros[name]] for name in poolings},
        {name: spread(torch.stack(part).sum(0)) for name, part in whole.items() if part},
    )


class _Seen:
    """What a pass over images leaves."""

    def __init__(self, poolings: Sequence[str], folder: Path | None) -> None:
        self.stores = {name: _Store(folder, name) for name in poolings}
        self.indices = [torch.empty(0, dtype=torch.long)]
        self.faulty: dict[str, list[str]] = {name: [] for name in poolings}
        self.zero: dict[str, list[str]] = {name: [] for name in poolings}
        self.sums: dict[str, Tensor] = {}

    def add(self, images: Tensor, vectors: Mapping[str, Tensor], path: Callable[[int], str]) -> None:
        """Shape: (B,) int64, {pooling: (B, D)}."""
        self.indices.append(images)
        for name, raw in vectors.items():
            self.faulty[name] += [path(int(image)) for image in images[~raw.isfinite().all(dim=1)]]
            self.zero[name] += [path(int(image)) for image in images[~raw.any(dim=1)]]
            rows = unit_rows(raw)
            self.sums[name] = self.sums.get(name, 0) + moments(rows)
            self.stores[name].add(rows)


def refuse_nonfinite(pooling: str, paths: Sequence[str], key: str) -> None:
    """Raise UserError where there are images whose vector is not finite."""
    if paths:
        raise UserError(
            f"k-NN: {pooling} of {some(paths)} of {key} is not finite: the network is broken there"
        )


def some(paths: Sequence[str]) -> str:
    """How many images, and the first of them."""
    more = ", …" if len(paths) > SHOWN else ""
    return f"{len(paths)} images ({', '.join(printable(path) for path in paths[:SHOWN])}{more})"


def _readable(failures: Sequence[Failure], num_images: int) -> Tensor:
    """Shape: (n,) int64, rising."""
    readable = torch.ones(num_images, dtype=torch.bool)
    readable[[failure.image for failure in failures]] = False
    return readable.nonzero().flatten()


class _Store:
    """Rows as they come: kept, or appended to a file, which no full disk can damage unnoticed."""

    def __init__(self, folder: Path | None, name: str) -> None:
        self._file = None if folder is None else folder / f"{name.replace(':', '_')}.f16"
        self._kept: list[Tensor] = []
        self._count = 0

    def add(self, rows: Tensor) -> None:
        """Shape: (B, D)."""
        self._count += len(rows)
        if self._file is None:
            self._kept.append(rows)
            return
        try:
            with self._file.open("ab") as file:
                file.write(rows.half().numpy().tobytes())
        except OSError as error:
            raise _unwritable(str(self._file.parent), error) from error

    def rows(self, dim: int) -> Tensor:
        """All of them; of a file only what is looked at is in memory.

        Shape:
            (n, D) float32, or float16 in a mapped file
        """
        if self._file is None or not self._count:
            joined = torch.cat(self._kept) if self._kept else torch.empty(0, dim)
            self._kept = []
            return joined
        mapped = torch.from_file(str(self._file), shared=False, size=self._count * dim, dtype=torch.float16)
        return mapped.view(self._count, dim)


def _unwritable(folder: str, error: OSError) -> UserError:
    return UserError(
        f"knn.features_dir={printable(folder)} can't be written: {error.strerror}; name a folder on a disk "
        "with room for the training features"
    )
