"""k-NN and linear accuracy of a backbone, its speed and its memory, at one test size after the other.

Protocol: neighbours and classifier come from the training images at one size, that of the run (`own`), and
only the test images change, as when a finished system meets other images. With `test`, training images are
shown at the test size too, which tells what the features hold rather than how well they carry over.

Shapes used below: N training images, M test images.
"""

import logging
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from nestling.backbones import Backbone
from nestling.ssl.config import Config
from nestling.ssl.data.channels import channels, normalisation
from nestling.ssl.data.ledger import Ledger
from nestling.ssl.data.sources.base import ImageSource, Subset
from nestling.ssl.distributed import failing_together, is_main, patiently
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.features import Rows, extract, num_features
from nestling.ssl.evaluation.knn import knn
from nestling.ssl.evaluation.knn.parts import refuse_nonfinite
from nestling.ssl.evaluation.labels import matched_labels, refuse_shared_files
from nestling.ssl.evaluation.linear.cached import COPIES, memory, refuse_above_memory
from nestling.ssl.evaluation.online import loader_with
from nestling.ssl.evaluation.resolution.cost import measured
from nestling.ssl.evaluation.resolution.linear import Classifier, fit_linear
from nestling.ssl.evaluation.resolution.sizes import Size, shown
from nestling.ssl.run.memory import is_out_of_memory
from nestling.ssl.views.evaluation import Centre

logger = logging.getLogger("nestling")

STANDARDISED = 9  # times the features in float32, at the worst moment of `fit_linear`

Results = dict[str, dict[str, float | None]]  # by size, then by measure


class ResolutionJudge:
    """Judges with the first pooling and the first k of `config.knn`.

    All processes compute features; the main one searches, fits and measures, and it alone gets results.

    Raises:
        UserError: images without labels, no class in common, the same file on both sides; while judging:
            too many unreadable images.
    """

    def __init__(
        self, train: ImageSource, val: ImageSource, config: Config, process: int = 0, num_processes: int = 1
    ) -> None:
        self.config, self.place = config, (process, num_processes)
        self.pooling, self.k = config.knn.pooling[0], config.knn.k[0]
        self.own_size = config.knn.size or max(config.views.global_size)
        self.ledger = Ledger(config.data.max_bad_share, len(train) + len(val))
        train_labels, val_labels, self.class_names = matched_labels(train, val)
        refuse_shared_files(train, val)
        known = np.flatnonzero(val_labels >= 0)
        self.train, self.train_labels = train, torch.from_numpy(train_labels)
        self.val, self.val_labels = Subset(val, known), torch.from_numpy(val_labels[known])

    def judge(
        self,
        backbone: Backbone,
        device: torch.device,
        sizes: Mapping[str, Size],
        train_size: str,
        batch_size: int,
        repeats: int,
    ) -> Results:
        """What is found at each size; {} beside the main process. See `measured` for the last two."""
        self._refuse_above_memory(backbone, device)
        results: Results = {}
        train: Rows | None = None
        classify: Classifier | None = None
        for text, size in sizes.items():
            if train is None or train_size == "test":
                seen_at = size if train_size == "test" else (self.own_size, self.own_size)
                train, classify = self._rows(backbone, "data.train", seen_at, device), None
            test = self._rows(backbone, "data.val", size, device)
            logger.info(f"judging at {text} pixels")
            with failing_together(), patiently():
                if is_main():
                    classify = classify or self._fitted(train, device)
                    accuracies = {**self._by_neighbours(train, test), **self._by_line(classify, test, device)}
                    cost = self._cost(backbone, size, batch_size, repeats, device)
                    results[text] = {**accuracies, **cost}
        return results

    def _refuse_above_memory(self, backbone: Backbone, device: torch.device) -> None:
        """Features of all training images are held; where they are standardised, in float64 too."""
        size, copies = (self.own_size, self.own_size), STANDARDISED if device.type == "cpu" else COPIES
        width = num_features(backbone, [self.pooling], channels(self.config.data), size, device)
        advice = "give fewer images in data.train, or a knn.pooling of fewer numbers"
        with failing_together():
            if is_main():
                refuse_above_memory(len(self.train), {self.pooling: width}, memory(), copies, advice)

    def _rows(self, backbone: Backbone, key: str, size: Size, device: torch.device) -> Rows:
        """Those of all images of `data.train` or `data.val`."""
        source = self.train if key == "data.train" else self.val
        view = Centre(size, self.config.knn.crop_ratio)
        loader = loader_with(view, source, self.config, self.ledger, *self.place)
        mean, std = normalisation(self.config.data)
        rows = extract(backbone, loader, len(source), [self.pooling], mean, std, device)
        # Failures are known to all processes already, so only the main one's count.
        self.ledger.exchange(rows.failures if is_main() else [])
        with failing_together():
            for vectors in rows.vectors.values():  # none beside the main process
                bad = rows.indices[~vectors.isfinite().all(dim=1)].tolist()
                refuse_nonfinite(self.pooling, [source.path(index) for index in bad], key)
        return rows

    def _by_neighbours(self, train: Rows, test: Rows) -> dict[str, float]:
        settings = self.config.knn
        found = knn(
            train.vectors[self.pooling],
            self.train_labels[train.indices],
            test.vectors[self.pooling],
            self.val_labels[test.indices],
            [self.k],
            settings.temperature,
            len(self.class_names),
            settings.backend,
            num_threads=1,  # the next size's loader forks, which may hang after a search on several
        )
        return {f"knn/{self.pooling}/{name}": value for name, value in found.items()}

    def _fitted(self, train: Rows, device: torch.device) -> Classifier:
        features = train.vectors[self.pooling].to(device)
        return fit_linear(features, self.train_labels[train.indices].to(device), len(self.class_names))

    def _by_line(self, classify: Classifier, test: Rows, device: torch.device) -> dict[str, float]:
        labels: Tensor = self.val_labels[test.indices]
        right = classify(test.vectors[self.pooling].to(device)).cpu() == labels
        return {f"linear/{self.pooling}/top1": right.double().mean().item()}

    def _cost(
        self, backbone: Backbone, size: Size, batch_size: int, repeats: int, device: torch.device
    ) -> dict[str, float | None]:
        try:
            return measured(backbone, channels(self.config.data), size, batch_size, repeats, device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise UserError(
                f"timing.batch_size={batch_size} images of {shown(size)} pixels don't fit into memory; "
                "lower it"
            ) from error
