"""What can be said of a backbone's features without labels: during training, and by itself afterwards.

Shapes used below: n readable images.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nestling.backbones import Backbone
from nestling.ssl.config import Config
from nestling.ssl.data.channels import normalisation
from nestling.ssl.data.ledger import Ledger
from nestling.ssl.data.sources.base import ImageSource, Subset, evenly
from nestling.ssl.distributed import everyones, failing_together, is_main, patiently
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.features import Batches, Rows, extract
from nestling.ssl.evaluation.online import batches_of
from nestling.ssl.evaluation.unlabelled.overlap import nearest_images, overlap_of
from nestling.ssl.evaluation.unlabelled.spectrum import alpha_req, rankme
from nestling.ssl.evaluation.unlabelled.sphere import alignment, uniformity
from nestling.ssl.evaluation.unlabelled.views import GlobalView
from nestling.ssl.names import printable
from nestling.ssl.views.evaluation import Centre

ALIGNED = 1000  # images of which two more views are looked at
NEIGHBOURS = 10  # that are compared with those of the evaluation before


class Seen(NamedTuple):
    """Features of the images, and of two views of some of them; on the main process, empty on the others."""

    images: Rows
    views: tuple[Rows, Rows]


class UnlabelledJudge:
    """RankMe, a-ReQ and uniformity of the features of images, and alignment of two views of some of them.

    Of `source` at most `config.knn.max_val` images are looked at, evenly chosen, as k-NN would see them; the
    views are the run's own global ones. All processes share the work and return the same numbers. From the
    second time on it also says what share of their nearest others the images kept.

    `kept` is what it remembers for that, on the main process, by names such as `neighbours/cls`; a run that
    goes on puts back what its checkpoint held.

    Raises:
        UserError: while judging: features that are not finite, or too many unreadable images.
    """

    def __init__(
        self,
        source: ImageSource,
        config: Config,
        process: int = 0,
        num_processes: int = 1,
        ledger: Ledger | None = None,
    ) -> None:
        self.settings, self.normalisation = config.knn, normalisation(config.data)
        self.size = config.knn.size or max(config.views.global_size)
        self.images = Subset(source, evenly(len(source), config.knn.max_val))
        self.aligned = Subset(self.images, evenly(len(self.images), ALIGNED))
        self.ledger = ledger or Ledger(config.data.max_bad_share, len(self.images))
        self.kept: dict[str, Tensor] = {}
        shared = (self.ledger, process, num_processes)
        centre = Centre((self.size, self.size), config.knn.crop_ratio)
        self._batches = batches_of(self.images, config, centre, *shared)
        self._views = [
            batches_of(
                self.aligned, config, GlobalView(config.views, self.size, config.seed, number), *shared
            )
            for number in (0, 1)
        ]

    def said(self) -> str:
        """A line for the start of a run."""
        images = f"{len(self.images)} images of {printable(self.images.name)}"
        return f"features are judged without labels on {images}"

    def judge(
        self, backbone: Backbone, device: torch.device | str, autocast: torch.dtype | None = None
    ) -> dict[str, float]:
        """Values such as `features/rankme/cls`; those of the first pooling come first."""
        seen = self.seen(backbone, device, autocast)
        return self.values(seen) | self._overlaps(seen.images)

    def seen(
        self, backbone: Backbone, device: torch.device | str, autocast: torch.dtype | None = None
    ) -> Seen:
        """The features that are judged."""

        def of(batches: Batches, source: Subset) -> Rows:
            poolings = self.settings.pooling
            rows = extract(backbone, batches, len(source), poolings, *self.normalisation, device, autocast)
            with failing_together():
                _refuse_nonfinite(rows, source)
            # Failures are known to all processes already, so only the main one's count.
            self.ledger.exchange(rows.failures if is_main() else [])
            return rows

        first, second = (of(batches, self.aligned) for batches in self._views)
        return Seen(of(self._batches, self.images), (first, second))

    def values(self, seen: Seen) -> dict[str, float]:
        """The numbers, the same on all processes."""
        values: dict[str, float] = {}
        for pooling, features in seen.images.vectors.items():
            first, second = (view.vectors[pooling] for view in seen.views)
            values |= {
                f"features/rankme/{pooling}": rankme(features),
                f"features/alpha_req/{pooling}": alpha_req(features),
                f"features/uniformity/{pooling}": uniformity(features),
                f"features/alignment/{pooling}": alignment(first, second),
            }
        return everyones([values])[0]  # the main process comes first

    def _overlaps(self, images: Rows) -> dict[str, float]:
        """As `features/overlap/cls_k10`: neighbours shared with the last time, those of now being kept."""
        values: dict[str, float] = {}
        with failing_together(), patiently():
            if is_main():
                for pooling, now in nearest_images(images, NEIGHBOURS, self.settings.backend).items():
                    before = self.kept.get(f"neighbours/{pooling}")
                    share = None if before is None else overlap_of(before, now)
                    if before is not None and share is not None:
                        k = min(before.shape[1], now.shape[1]) - 1
                        values[f"features/overlap/{pooling}_k{k}"] = share
                    self.kept[f"neighbours/{pooling}"] = now
        return everyones([values])[0]  # the main process comes first


def _refuse_nonfinite(rows: Rows, source: Subset) -> None:
    for pooling, features in rows.vectors.items():
        finite = features.isfinite().all(dim=1)
        if not finite.all():
            path = source.path(int(rows.indices[~finite][0]))
            raise UserError(
                f"{pooling} of {int((~finite).sum())} images, such as {printable(path)}, is not finite: the "
                "network is broken there"
            )
