"""k-NN of a backbone on a labelled dataset: during training, and by itself in eval_knn."""

from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nestling.backbones import Backbone
from nestling.ssl.config import Config
from nestling.ssl.data.channels import channels, normalisation
from nestling.ssl.data.ledger import Ledger
from nestling.ssl.data.loader import EvalBatch, EvalLoader
from nestling.ssl.data.sources.base import ImageSource, Subset, evenly
from nestling.ssl.data.workers import default_workers
from nestling.ssl.distributed import failing_together, is_distributed, is_main, patiently
from nestling.ssl.evaluation.baselines import raw_pixels
from nestling.ssl.evaluation.features import Batches, Rows, extract
from nestling.ssl.evaluation.knn import knn, search
from nestling.ssl.evaluation.knn.parts import refuse_nonfinite
from nestling.ssl.evaluation.labels import matched_labels, refuse_shared_files
from nestling.ssl.evaluation.pictures import Query
from nestling.ssl.views.evaluation import Centre, View

CACHE_BYTES = 256 * 2**20  # decoded images up to this size are kept between evaluations
WITHOUT = ", or train without k-NN (knn.every=0)"  # what a run may do that has no labels
MAX_WORKERS = 4  # evaluations are short: more processes would take longer to start than they save


class OnlineKnn:
    """Judges backbones by k-NN: training images vote on the class of validation images.

    Classes are matched by name, those of the training images being the ones that exist; validation
    images of other classes are left out and counted in the log. Every process computes the features
    of its share, the main one searches, and all return the same numbers. Unreadable images neither vote
    nor are judged; the `ledger` names them.

    Raises:
        UserError: images without labels, no class in common, the same file on both sides; while judging:
            too many unreadable images, or one where `data.on_error=raise`.
    """

    def __init__(
        self,
        train: ImageSource,
        val: ImageSource,
        config: Config,
        process: int = 0,
        num_processes: int = 1,
        search_threads: int | None = 1,
        ledger: Ledger | None = None,
    ) -> None:
        """Of `train` at most `config.knn.max_train` images vote, of `val` at most `max_val` are judged.

        `search_threads` as `num_threads` of `search`.
        """
        self.search_threads = search_threads
        self.ledger = ledger or Ledger(config.data.max_bad_share, len(train) + len(val))
        self.num_readable = (len(train), len(val))  # as far as is known
        self.settings, self.channels = config.knn, channels(config.data)
        self.mean, self.std = normalisation(config.data)
        self.size = config.knn.size or max(config.views.global_size)
        train_labels, val_labels, self.class_names = matched_labels(train, val, WITHOUT)
        refuse_shared_files(train, val)
        used = evenly(len(train), config.knn.max_train)
        known = np.flatnonzero(val_labels >= 0)
        known = known[evenly(len(known), config.knn.max_val)]
        self.train, self.train_labels = Subset(train, used), torch.from_numpy(train_labels[used])
        self.val, self.val_labels = Subset(val, known), torch.from_numpy(val_labels[known])
        view = Centre((self.size, self.size), config.knn.crop_ratio)
        self._train_batches, self._val_batches = (
            batches_of(source, config, view, self.ledger, process, num_processes)
            for source in (self.train, self.val)
        )

    def judge(
        self, backbone: Backbone, device: torch.device | str, autocast: torch.dtype | None = None
    ) -> dict[str, float]:
        """Accuracies such as `knn/cls/top1_k20`; those of the first pooling and k come first."""
        return self._judged_by_all(*self._features(backbone, device, autocast), device)

    def judge_pixels(self, device: torch.device | str = "cpu") -> dict[str, float]:
        """The same of the raw pixels, as `knn/pixels/top1_k20`: what a network has to beat."""
        shared = (self.size, self.channels, device)
        train = raw_pixels(self._train_batches, len(self.train), *shared)
        val = raw_pixels(self._val_batches, len(self.val), *shared)
        self._tell(train, val)
        return self._judged_by_all(train, val, device)

    def examples(
        self, backbone: Backbone, device: torch.device | str, num_queries: int = 7, num_neighbours: int = 6
    ) -> list[Query]:
        """Evenly chosen validation images with their nearest training images; [] beside the main process."""
        train, val = self._features(backbone, device, None)
        if not is_main():
            return []
        pooling, settings = self.settings.pooling[0], self.settings
        # From the middle of equal stretches, so that neighbouring classes take turns.
        rows = evenly(2 * len(val.indices), 2 * num_queries)[1::2] // 2
        k = min(num_neighbours, len(train.indices))
        _, found = search(
            train.vectors[pooling], val.vectors[pooling][rows], k, settings.backend, self.search_threads
        )
        return [
            Query(*self._shown(self.val, self.val_labels, query), *self._all_shown(train.indices[row]))
            for query, row in zip(val.indices[rows].tolist(), found, strict=True)
        ]

    def _all_shown(self, indices: Tensor) -> tuple[list[np.ndarray], list[str]]:
        shown = [self._shown(self.train, self.train_labels, index) for index in indices.tolist()]
        return [image for image, _ in shown], [label for _, label in shown]

    def _shown(self, source: ImageSource, labels: Tensor, index: int) -> tuple[np.ndarray, str]:
        return source.load(index), self.class_names[int(labels[index])]

    def _features(
        self, backbone: Backbone, device: torch.device | str, autocast: torch.dtype | None
    ) -> tuple[Rows, Rows]:
        shared = (self.settings.pooling, self.mean, self.std, device, autocast)
        train = extract(backbone, self._train_batches, len(self.train), *shared)
        val = extract(backbone, self._val_batches, len(self.val), *shared)
        self._tell(train, val)
        return train, val

    def _tell(self, train: Rows, val: Rows) -> None:
        """Failures are known to all processes already, so only the main one's count."""
        self.ledger.exchange([*train.failures, *val.failures] if is_main() else [])
        self.num_readable = (len(self.train) - len(train.failures), len(self.val) - len(val.failures))

    def _judged_by_all(self, train: Rows, val: Rows, device: torch.device | str) -> dict[str, float]:
        """Search on the main process and tell the others, its errors included."""
        told: list[dict[str, float]] = [{}]
        with failing_together(), patiently():
            if is_main():
                told = [self._search(train, val)]
        if is_distributed():
            place = None if dist.get_backend() == "gloo" else torch.device(device)
            dist.broadcast_object_list(told, src=0, device=place)
        return told[0]

    def _search(self, train: Rows, val: Rows) -> dict[str, float]:
        settings = self.settings
        for rows, source, key in ((train, self.train, "data.train"), (val, self.val, "data.val")):
            for name, vectors in rows.vectors.items():
                bad = rows.indices[~vectors.isfinite().all(dim=1)].tolist()
                refuse_nonfinite(name, [source.path(index) for index in bad], key)
        return {
            f"knn/{pooling}/{name}": value
            for pooling in train.vectors
            for name, value in knn(
                train.vectors[pooling],
                self.train_labels[train.indices],
                val.vectors[pooling],
                self.val_labels[val.indices],
                settings.k,
                settings.temperature,
                len(self.class_names),
                settings.backend,
                self.search_threads,
            ).items()
        }


def loader_of(
    source: ImageSource, config: Config, size: int, ledger: Ledger, process: int, num_processes: int
) -> EvalLoader:
    """This process's share of the images as k-NN sees them."""
    view = Centre((size, size), config.knn.crop_ratio)
    return loader_with(view, source, config, ledger, process, num_processes)


def loader_with(
    view: View, source: ImageSource, config: Config, ledger: Ledger, process: int, num_processes: int
) -> EvalLoader:
    """This process's share of some view of the images."""
    workers = config.data.num_workers
    return EvalLoader(
        source,
        config.data,
        view,
        batch_size=config.knn.batch_size,
        num_workers=min(MAX_WORKERS, default_workers() if workers is None else workers),
        process=process,
        num_processes=num_processes,
        ledger=ledger,
    )


def batches_of(
    source: ImageSource, config: Config, view: View, ledger: Ledger, process: int, num_processes: int
) -> Batches:
    """The same, kept in memory where all of it is small: for who looks again and again."""
    loader = loader_with(view, source, config, ledger, process, num_processes)
    height, width = view.size
    return _Kept(loader) if len(source) * channels(config.data) * height * width <= CACHE_BYTES else loader


class _Kept:
    """Batches that are read once and stay in memory."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._kept: list[EvalBatch] | None = None

    def __iter__(self) -> Iterator[EvalBatch]:
        if self._kept is None:
            self._kept = list(self._batches)
        return iter(self._kept)
