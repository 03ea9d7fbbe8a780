"""k-NN of a backbone on a labelled dataset: during training, and by itself in eval_knn.

Shapes used below: N training images, M test images, D feature channels, S pixels of a side.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nestling.backbones import Backbone
from nestling.ssl.config import Config
from nestling.ssl.data.loader import EvalLoader, default_workers
from nestling.ssl.data.sources import ImageSource, Subset
from nestling.ssl.distributed import is_distributed, is_main
from nestling.ssl.evaluation.baselines import raw_pixels
from nestling.ssl.evaluation.features import Batches, extract, failing_together
from nestling.ssl.evaluation.knn import knn, search
from nestling.ssl.evaluation.labels import evenly, matched_labels, refuse_shared_files
from nestling.ssl.evaluation.pictures import Query

CACHE_BYTES = 256 * 2**20  # decoded images up to this size are kept between evaluations
MAX_WORKERS = 4  # evaluations are short: more processes would take longer to start than they save


class OnlineKnn:
    """Judges backbones by k-NN: training images vote on the class of validation images.

    Classes are matched by name, those of the training images being the ones that exist; validation
    images of other classes are left out and counted in the log. Every process computes the features
    of its share, the main one searches, and all return the same numbers.

    Raises:
        UserError: images without labels, no class in common, the same file on both sides.
    """

    def __init__(
        self,
        train: ImageSource,
        val: ImageSource,
        config: Config,
        process: int = 0,
        num_processes: int = 1,
        search_threads: int | None = 1,
    ) -> None:
        """Of `train` at most `config.knn.max_train` images vote, of `val` at most `max_val` are judged.

        `search_threads` as `num_threads` of `search`.
        """
        self.search_threads = search_threads
        self.settings, self.mean, self.std = config.knn, config.data.mean, config.data.std
        self.size = config.knn.size or max(config.views.global_size)
        train_labels, val_labels, self.class_names = matched_labels(train, val)
        refuse_shared_files(train, val)
        used = evenly(len(train), config.knn.max_train)
        known = np.flatnonzero(val_labels >= 0)
        known = known[evenly(len(known), config.knn.max_val)]
        self.train, self.train_labels = Subset(train, used), torch.from_numpy(train_labels[used])
        self.val, self.val_labels = Subset(val, known), torch.from_numpy(val_labels[known])
        self._train_batches, self._val_batches = (
            self._batches(source, config, process, num_processes) for source in (self.train, self.val)
        )

    def _batches(self, source: ImageSource, config: Config, process: int, num_processes: int) -> Batches:
        """This process's share of a source, kept in memory where all of it is small."""
        workers = config.data.num_workers
        loader = EvalLoader(
            source,
            size=self.size,
            crop_ratio=config.knn.crop_ratio,
            batch_size=config.knn.batch_size,
            num_workers=min(MAX_WORKERS, default_workers() if workers is None else workers),
            start_method=config.data.start_method,
            process=process,
            num_processes=num_processes,
        )
        return _Kept(loader) if len(source) * 3 * self.size**2 <= CACHE_BYTES else loader

    def judge(
        self, backbone: Backbone, device: torch.device | str, autocast: torch.dtype | None = None
    ) -> dict[str, float]:
        """Accuracies such as `knn/cls/top1_k20`; those of the first pooling and k come first."""
        train, val = self._features(backbone, device, autocast)
        return self._judged_by_all({pooling: (train[pooling], val[pooling]) for pooling in train}, device)

    def judge_pixels(self, device: torch.device | str = "cpu") -> dict[str, float]:
        """The same of the raw pixels, as `knn/pixels/top1_k20`: what a network has to beat."""
        train = raw_pixels(self._train_batches, len(self.train), self.size, device)
        val = raw_pixels(self._val_batches, len(self.val), self.size, device)
        return self._judged_by_all({"pixels": (train, val)} if is_main() else {}, device)

    def examples(
        self, backbone: Backbone, device: torch.device | str, num_queries: int = 7, num_neighbours: int = 6
    ) -> list[Query]:
        """Evenly chosen validation images with their nearest training images; [] beside the main process."""
        train, val = self._features(backbone, device, None)
        if not is_main():
            return []
        pooling, settings = self.settings.pooling[0], self.settings
        # From the middle of equal stretches, so that neighbouring classes take turns.
        queries = evenly(2 * len(self.val), 2 * num_queries)[1::2] // 2
        k = min(num_neighbours, len(self.train))
        _, indices = search(train[pooling], val[pooling][queries], k, settings.backend, self.search_threads)
        names = self.class_names
        return [
            Query(
                self.val.load(int(query)),
                names[int(self.val_labels[query])],
                [self.train.load(int(index)) for index in row],
                [names[int(self.train_labels[index])] for index in row],
            )
            for query, row in zip(queries, indices, strict=True)
        ]

    def _features(
        self, backbone: Backbone, device: torch.device | str, autocast: torch.dtype | None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        shared = (self.settings.pooling, self.mean, self.std, device, autocast)
        train = extract(backbone, self._train_batches, len(self.train), *shared)
        return train, extract(backbone, self._val_batches, len(self.val), *shared)

    def _judged_by_all(
        self, features: Mapping[str, tuple[Tensor, Tensor]], device: torch.device | str
    ) -> dict[str, float]:
        """Search on the main process and tell the others, its errors included."""
        told: list[dict[str, float]] = [{}]
        with failing_together():
            if is_main():
                told = [self._search(features)]
        if is_distributed():
            place = None if dist.get_backend() == "gloo" else torch.device(device)
            dist.broadcast_object_list(told, src=0, device=place)
        return told[0]

    def _search(self, features: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
        settings = self.settings
        return {
            f"knn/{pooling}/{name}": value
            for pooling, (train, val) in features.items()
            for name, value in knn(
                train,
                self.train_labels,
                val,
                self.val_labels,
                settings.k,
                settings.temperature,
                len(self.class_names),
                settings.backend,
                self.search_threads,
            ).items()
        }


class _Kept:
    """Batches that are read once and stay in memory."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._kept: list[tuple[Tensor, Tensor]] | None = None

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self._kept is None:
            self._kept = list(self._batches)
        return iter(self._kept)
