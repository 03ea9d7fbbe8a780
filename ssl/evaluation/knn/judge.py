"""k-NN of a backbone on all images there are, on any number of processes, in memory that is told before.

Shapes used below: N training images, M judged images.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestling.backbones import Backbone
from nestling.ssl.config import Config
from nestling.ssl.data.channels import channels, normalisation
from nestling.ssl.data.ledger import Ledger
from nestling.ssl.data.sources.base import ImageSource, Subset, evenly
from nestling.ssl.distributed import failing_together, is_main
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.features import num_features
from nestling.ssl.evaluation.knn.approximate import Approximate, recall, refuse_without_faiss
from nestling.ssl.evaluation.knn.backends import resolved
from nestling.ssl.evaluation.knn.exact import CONSTANT, Exact
from nestling.ssl.evaluation.knn.memory import told_before
from nestling.ssl.evaluation.knn.parts import Part, Vectors, scratch, some, vectors_of
from nestling.ssl.evaluation.knn.shots import draws, summary
from nestling.ssl.evaluation.knn.tables import confusions
from nestling.ssl.evaluation.knn.together import Found, Local, search_together
from nestling.ssl.evaluation.knn.voting import clamped, effective_ks, ranked_classes, shares_right
from nestling.ssl.evaluation.labels import matched_labels, shared_files, unknown_classes
from nestling.ssl.evaluation.online import loader_of
from nestling.ssl.names import printable

log = logging.getLogger("nestling")

COARSE = 16 * 2.0**-12  # deviation below which rounding to float16 (2^-12 of an entry) matters
SAMPLE = 256  # queries of a process by which the recall of an approximate index is measured


@dataclass(frozen=True)
class Search:
    """How neighbours are found: `index` flat, ivf or hnsw; training features as float16 in `features_dir`."""

    index: str = "flat"
    features_dir: str | None = None
    shots: Sequence[int] = ()
    repeats: int = 5
    seed: int = 0


@dataclass
class Judgement:
    """Accuracies such as `knn/cls/top1_k20`, and per pooling what else was found."""

    results: dict[str, float] = field(default_factory=dict)
    recall: dict[str, dict[str, float]] = field(default_factory=dict)
    shots: dict[str, dict[int, dict[str, dict[str, float | None]]]] = field(default_factory=dict)
    confusions: dict[str, dict[tuple[int, int], int]] = field(default_factory=dict)


class KnnJudge:
    """Lets all training images vote on the class of all validation images, under several poolings at once.

    Every process computes and searches the rows of its share. Classes are matched by name; an image
    that is on both sides doesn't vote on itself.

    Raises:
        UserError: images without labels, no class in common, an index that can't be had, or no other
            image to find; while judging: too many unreadable images, or vectors that are not finite.
    """

    def __init__(
        self,
        train: ImageSource,
        val: ImageSource,
        config: Config,
        search: Search,
        process: int = 0,
        num_processes: int = 1,
    ) -> None:
        self.config, self.search = config, search
        refuse_without_faiss(search.index, config.knn.backend)  # before a word on who searches instead
        self.backend = resolved(config.knn.backend)
        self.place = (process, num_processes)
        self.ledger = Ledger(config.data.max_bad_share, len(train) + len(val))
        self.size = config.knn.size or max(config.views.global_size)
        train_labels, val_labels, self.class_names = matched_labels(train, val)
        self.unknown = unknown_classes(val, val_labels)
        known = np.flatnonzero(val_labels >= 0)
        self.train, self.val = train, Subset(val, known)
        self.train_labels, self.val_labels = map(torch.from_numpy, (train_labels, val_labels[known]))
        self.num_own, self.num_shared = 0, 0
        self._files: tuple[Tensor | None, Tensor | None] = (None, None)
        self._tell_apart(shared_files(train, val), known)
        self.num_readable = (len(train), len(known))

    def _tell_apart(self, numbers: tuple[np.ndarray, np.ndarray] | None, known: np.ndarray) -> None:
        if numbers is None:
            return
        ours, queries = numbers[0], numbers[1][known]
        copies = np.bincount(ours)[np.intersect1d(ours, queries)]
        self.num_shared = int(np.isin(queries, ours).sum())
        if self.num_shared:
            self.num_own = int(copies.max())
            self._files = (torch.from_numpy(ours), torch.from_numpy(queries))
            log.info(
                f"k-NN: {self.num_shared} of {len(queries)} images to judge are training images too; none "
                "votes on itself"
            )

    def judge(self, backbone: Backbone, device: torch.device) -> Judgement:
        """All that is known of the backbone; empty beside the main process."""
        shape = channels(self.config.data), (self.size, self.size)
        width = num_features(backbone, self.config.knn.pooling, *shape, device)
        with failing_together():  # each machine has a disk of its own
            told_before(width, self.search, self.num_readable, self.place[1])
        with scratch(self.search.features_dir) as folder:
            train, val = self._vectors(backbone, device, folder)
            num_train = len(train.readable) - self.num_own
            with failing_together():
                if num_train < 1:
                    raise UserError(
                        f"data.train={printable(self.train.name)} has no image but the one that is judged"
                    )
            ks = effective_ks(self.config.knn.k, num_train)
            found = Judgement()
            for pooling in self.config.knn.pooling:
                sides = train.parts[pooling], val.parts[pooling]
                self._judge(found, pooling, *sides, ks, device)
                if self.search.shots:
                    shots = self._few_shots(train.readable, *sides, ks, device)
                    found.shots[pooling] = shots
            return found

    def _vectors(
        self, backbone: Backbone, device: torch.device, folder: Path | None
    ) -> tuple[Vectors, Vectors]:
        def of(source: ImageSource, key: str, files: Tensor | None, folder: Path | None) -> Vectors:
            """Those of one side, which messages call by `key`; beyond memory they go to `folder`."""
            return vectors_of(
                backbone,
                loader_of(source, self.config, self.size, self.ledger, *self.place),
                len(source),
                self.config.knn.pooling,
                *normalisation(self.config.data),
                device,
                source.path,
                f"{key}={printable(source.name)}",
                files,
                folder,
            )

        train = of(self.train, "data.train", self._files[0], folder)
        val = of(self.val, "data.val", self._files[1], None)
        self.ledger.exchange([*train.failures, *val.failures] if is_main() else [])
        self.num_readable = (len(train.readable), len(val.readable))
        for side, key in ((train, "data.train"), (val, "data.val")):
            for name, paths in side.zero.items():
                if paths:
                    log.warning("k-NN: %s of %s of %s is zero", name, some(paths), key)
        for name, spread in train.spreads.items() if len(train.readable) > 1 else ():
            self._warn_of_likeness(name, spread, train.parts[name].rows.shape[1])
        return train, val

    def _warn_of_likeness(self, name: str, spread: float, width: int) -> None:
        if spread < CONSTANT:
            log.warning(
                "k-NN: %s is constant (std < %g) over data.train: the network has collapsed", name, CONSTANT
            )
        elif self.search.features_dir is not None and spread * width**0.5 < COARSE:
            log.warning(
                "k-NN: %s differs so little between images (std %.2g) that float16 changes who is near: "
                "leave knn.features_dir out",
                name,
                spread,
            )

    def _judge(
        self, judged: Judgement, pooling: str, train: Part, val: Part, ks: Sequence[int], device: torch.device
    ) -> None:
        found = search_together(train.indices, val, max(ks), self._local(train), device)
        if self.search.index != "flat":
            sample = val.at(torch.from_numpy(evenly(len(val.indices), SAMPLE)))
            exact = search_together(train.indices, sample, max(ks), self._exact(train), device)
            if is_main():
                judged.recall[pooling] = recall(found, exact, ks)
        if not is_main():
            return
        ranked, results = self._vote(found, ks)
        judged.results |= {f"knn/{pooling}/{name}": value for name, value in results.items()}
        judged.confusions[pooling] = confusions(self.val_labels[found.queries], ranked[ks[0]][:, 0])

    def _vote(self, found: Found, ks: Sequence[int]) -> tuple[dict[int, Tensor], dict[str, float]]:
        num_classes = len(self.class_names)
        ranked = ranked_classes(
            found.similarities.clamp(-1, 1).masked_fill(found.indices < 0, -torch.inf),
            found.indices,
            self.train_labels,
            ks,
            self.config.knn.temperature,
            num_classes,
        )
        return ranked, shares_right(ranked, self.val_labels[found.queries], num_classes)

    def _few_shots(
        self, readable: Tensor, train: Part, val: Part, ks: Sequence[int], device: torch.device
    ) -> dict[int, dict[str, dict[str, float | None]]]:
        """Per number of shots the mean and deviation of each accuracy; {} beside the main process."""
        search = self.search
        results: dict[int, list[dict[str, float]]] = {}
        for shots, places in draws(self.train_labels[readable], search.shots, search.repeats, search.seed):
            few = train.chosen(readable[places])
            usable = clamped(ks, len(places))
            found = search_together(few.indices, val, max(usable), self._exact(few), device)
            if is_main():
                results.setdefault(shots, []).append(self._vote(found, usable)[1])
        return {shots: summary(repeats) for shots, repeats in results.items()}

    def _exact(self, train: Part) -> Exact:
        return Exact(train.rows, train.files, self.backend, None, self.num_own)

    def _local(self, train: Part) -> Local:
        if self.search.index == "flat":
            return self._exact(train)
        return Approximate(train.rows, self.search.index, train.files, None, self.num_own)

    def facts(self) -> dict[str, Any]:
        """What the results depend on besides the settings."""
        return {
            "data": {"train": self.train.name, "val": self.val.name},
            "num_train": self.num_readable[0],
            "num_val": self.num_readable[1],
            "unreadable": self.ledger.paths(),
            "num_classes": len(self.class_names),
            "unknown_classes": self.unknown,
            "num_without_self": self.num_shared,
            "size": self.size,
            "crop_ratio": self.config.knn.crop_ratio,
            "temperature": self.config.knn.temperature,
            "backend": self.backend,
        }
