"""Heads on features that were computed once: minutes instead of passes over the images.

The main process holds the features and trains; with several the backbone's work alone is shared, so their
number changes nothing. Shapes used below: N rows, B of a step, D channels of a read-out, C classes.
"""

import os
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from nestling.ssl.data.channels import normalisation
from nestling.ssl.data.order import epoch_order
from nestling.ssl.distributed import failing_together, is_main
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.features import Rows, extract
from nestling.ssl.evaluation.linear.columns import Columns
from nestling.ssl.evaluation.linear.descent import Descent
from nestling.ssl.evaluation.linear.heads import HeadGrid, HeadSpec, first_heads
from nestling.ssl.evaluation.linear.logistic import regularisation_path
from nestling.ssl.evaluation.linear.scores import Counter, Scores
from nestling.ssl.evaluation.linear.settings import HIGHEST_C, LOWEST_C, NUM_C, RATES
from nestling.ssl.evaluation.linear.task import Task
from nestling.ssl.names import printable

COPIES = 3  # of the features at the worst moment: as they came, joined, in the order of the dataset
LOGITS = 1 << 25  # held at once while heads are scored: 128 MB in float32


class Cached:
    """SGD on kept features; every process must build it, the main one alone may use it.

    Raises:
        UserError: the features would not fit into memory, or are not finite, or what reading images raises.
    """

    setting = "lr"
    together = False

    def __init__(self, task: Task) -> None:
        self.task = task
        self.columns = Columns(task.readouts, task.block_widths)
        refuse_above_memory(len(task.train) + len(task.val), self.columns.kept, memory())
        self.rows = {side: self._extracted(side) for side in ("train", "val")}
        failures = [failure for rows in self.rows.values() for failure in rows.failures]
        task.ledger.exchange(failures if is_main() else [])
        with failing_together():
            if is_main():
                self._refuse_nonfinite()

    def _extracted(self, side: str) -> Rows:
        task = self.task
        return extract(
            task.trained.backbone,
            task.centre_views(side),
            len(task.source(side)),
            [*self.columns.kept],
            *normalisation(task.data),
            task.device,
            task.autocast,
        )

    def _refuse_nonfinite(self) -> None:
        """Raise UserError where a feature is NaN or infinite, naming an image."""
        for side, rows in self.rows.items():
            bad = ~torch.stack([part.isfinite().all(dim=1) for part in rows.vectors.values()]).all(dim=0)
            if bad.any():
                first = self.task.source(side).path(int(rows.indices[bad][0]))
                raise UserError(
                    f"the features of {int(bad.sum())} of {len(bad)} images of data.{side} are not finite, "
                    f"such as those of {printable(first)}: the weights are broken, or linear.precision="
                    f"{self.task.settings.precision} is too narrow for them"
                )

    def values(self) -> Sequence[float]:
        """The learning rates of the grid."""
        return self.task.settings.lr or RATES

    def fit(self, specs: Sequence[HeadSpec], indices: np.ndarray) -> HeadGrid:
        """Heads trained on those training images, as far as they could be read."""
        task, settings = self.task, self.task.settings
        rows = self._rows_of("train", indices)
        grid = first_heads(specs, task.widths, len(task.class_names), settings.seed, task.device)
        scaling = self._scaling(rows, specs)
        steps = -(-len(rows) // settings.batch_size)
        descent = Descent(grid, settings.batch_size, steps * settings.epochs, settings.momentum, False)
        for epoch in range(settings.epochs):
            order = rows[torch.from_numpy(epoch_order(len(rows), settings.seed, epoch))]
            for part in order.split(settings.batch_size):
                vectors, labels = self._at("train", part)
                descent.step(scaling.of(vectors), labels)
        return scaling.folded(grid)

    def score(self, grid: HeadGrid, side: str, indices: np.ndarray) -> Scores:
        """Accuracies on those images of a side, as far as they could be read."""
        rows = self._rows_of(side, indices)
        counter = Counter(len(grid.specs), self.task.device)
        for part in rows.split(max(1, LOGITS // (len(grid.specs) * grid.num_classes))):
            vectors, labels = self._at(side, part)
            counter.add(grid.logits(vectors), labels)
        return counter.scores(together=False)

    def _rows_of(self, side: str, indices: np.ndarray) -> Tensor:
        """The rows of those images, in their order; unreadable ones have none."""
        found = np.flatnonzero(np.isin(self.rows[side].indices.numpy(), indices))
        if not len(found):
            raise UserError(f"none of {len(indices)} images of data.{side} that heads need can be read")
        return torch.from_numpy(found)

    def _at(self, side: str, rows: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Shape: (B,) rows -> {readout: (B, D)} on the device, labels (B,)."""
        kept = self.rows[side]
        parts = {name: part[rows].to(self.task.device) for name, part in kept.vectors.items()}
        return self.columns(parts), self.task.labels_of(side, kept.indices[rows])

    def _scaling(self, rows: Tensor, specs: Sequence[HeadSpec]) -> "Scaling":
        if not self.task.settings.standardise:
            return Scaling({})
        return Scaling(self._moments(rows, {spec.readout for spec in specs}))

    def _moments(self, rows: Tensor, names: set[str]) -> dict[str, tuple[Tensor, Tensor]]:
        """Mean and standard deviation of each channel over those rows, 1 where a channel is constant."""
        sums: dict[str, Tensor] = {}
        # The second pass around the first one's means: a difference of squares would lose all digits.
        for squared in (False, True):
            means = {name: total / len(rows) for name, total in sums.items()}
            sums = {}
            for vectors in self._parts(rows):
                for name in names:
                    part = vectors[name].cpu().double()
                    part = (part - means[name]).square() if squared else part
                    sums[name] = sums.get(name, torch.zeros(part.shape[1]).double()) + part.sum(dim=0)
        found = {}
        for name in names:
            spread = (sums[name] / len(rows)).sqrt()
            found[name] = (means[name], torch.where(spread > 1e-6 * means[name].abs() + 1e-12, spread, 1.0))
        return found

    def _parts(self, rows: Tensor) -> Iterator[dict[str, Tensor]]:
        for part in rows.split(8192):
            yield self._at("train", part)[0]


class Logistic(Cached):
    """The same features under logistic regression; a grid over c in the place of the learning rate."""

    setting = "c"

    def values(self) -> Sequence[float]:
        """The c of the path."""
        return self.task.settings.c or np.logspace(LOWEST_C, HIGHEST_C, NUM_C).tolist()

    def fit(self, specs: Sequence[HeadSpec], indices: np.ndarray) -> HeadGrid:
        """Heads at the minimum on those training images, as far as they could be read."""
        rows = self._rows_of("train", indices)
        scaling = self._scaling(rows, specs)
        place = torch.device("cpu") if self.task.device.type == "mps" else self.task.device  # no float64
        labels = self.task.labels_of("train", self.rows["train"].indices[rows]).to(place)
        weights, biases = {}, {}
        for name in dict.fromkeys(spec.readout for spec in specs):
            vectors = torch.cat(
                [scaling.of({name: part[name]})[name].to(place) for part in self._parts(rows)]
            )
            weights[name], biases[name] = regularisation_path(
                vectors,
                labels,
                len(self.task.class_names),
                [spec.value for spec in specs if spec.readout == name],
                self.task.settings.max_iterations,
                self.task.settings.tolerance,
            )
        return scaling.folded(HeadGrid(specs, weights, biases))


class Scaling:
    """Channels less their mean, over their standard deviation, while heads learn; {} changes nothing."""

    def __init__(self, moments: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        self._moments = dict(moments)

    def of(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Shape: {readout: (B, D)} -> the same."""
        return {name: self._scaled(name, rows) for name, rows in vectors.items()}

    def _scaled(self, name: str, rows: Tensor) -> Tensor:
        if name not in self._moments:
            return rows
        mean, spread = (part.to(rows.device, rows.dtype) for part in self._moments[name])
        return (rows - mean) / spread

    def folded(self, grid: HeadGrid) -> HeadGrid:
        """Heads that say of features as they are what these say of scaled ones."""
        for name, (mean, spread) in self._moments.items():
            weight = grid.weights[name]
            scaled = weight.double().cpu() / spread
            shift = scaled @ mean
            grid.weights[name] = scaled.to(weight.device, weight.dtype)
            grid.biases[name] = grid.biases[name] - shift.to(weight.device, weight.dtype)
        return grid


def memory() -> int | None:
    """Bytes of this machine's memory; None where it doesn't say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def refuse_above_memory(
    num_images: int,
    widths: Mapping[str, int],
    available: int | None,
    copies: int = COPIES,
    advice: str = "give fewer linear.readouts, or take protocol=dino, which keeps none",
) -> None:
    """Raise UserError where the features of all images would not fit."""
    needed = 4 * copies * num_images * sum(widths.values())
    if available is not None and needed > available:
        raise UserError(
            f"{sum(widths.values())} numbers of each of {num_images} images take {needed / 1e9:.1f} GB while "
            f"they are gathered, and this machine has {available / 1e9:.1f} GB: {advice}"
        )
