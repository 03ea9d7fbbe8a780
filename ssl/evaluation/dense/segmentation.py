"""Judge a frozen backbone by the classes of pixels: learn or remember on one folder, predict on another."""

import csv
import logging
from pathlib import Path

import torch

from nestling.backbones import Backbone
from nestling.ssl.config import Config
from nestling.ssl.data.failures import Failure
from nestling.ssl.data.ledger import Ledger
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.dense.crops import crop_batches
from nestling.ssl.evaluation.dense.folder import MaskedImages
from nestling.ssl.evaluation.dense.iou import ClassScore, Confusion
from nestling.ssl.evaluation.dense.linear import train_head
from nestling.ssl.evaluation.dense.patch_knn import PatchMemory
from nestling.ssl.evaluation.dense.settings import Linear, PatchKnn
from nestling.ssl.evaluation.dense.sliding import Score, Windows
from nestling.ssl.evaluation.features import untouched
from nestling.ssl.run.disk import replaced

logger = logging.getLogger("nestling")

TOLD = 10  # times that it is said how far the judging is


class Segmentation:
    """One backbone on one pair of folders; `ledger` and `train_ledger` hold the images left out.

    Raises, from its methods:
        UserError: a mask is wrong, or too many images can't be read.
    """

    def __init__(
        self,
        train: MaskedImages,
        val: MaskedImages,
        config: Config,
        num_classes: int,
        size: int,
        num_blocks: int,
        batch_size: int,
    ) -> None:
        self.train, self.val, self.config, self.num_classes = train, val, config, num_classes
        self.size, self.num_blocks, self.batch_size = size, num_blocks, batch_size
        self.ledger = Ledger(config.data.max_bad_share, len(val))
        self.train_ledger = Ledger(config.data.max_bad_share, len(train))

    def linear(self, backbone: Backbone, device: torch.device, settings: Linear) -> Confusion:
        """What a linear layer reaches."""
        if settings.warmup_steps >= settings.steps:
            raise UserError(
                f"linear.warmup_steps={settings.warmup_steps} must be below linear.steps={settings.steps}"
            )
        with untouched(backbone):
            windows = self._windows(backbone, device)
            crops = crop_batches(
                self.train,
                self.config.data,
                self.num_classes,
                self.size,
                settings.batch_size,
                settings.steps,
                self.config.seed,
            )
            ledger, seed = self.train_ledger, self.config.seed
            head = train_head(crops, windows, self.num_classes, settings, ledger, seed)
            return self._judge(windows, head)

    def patch_knn(self, backbone: Backbone, device: torch.device, settings: PatchKnn) -> Confusion:
        """What the votes of training patches reach."""
        with untouched(backbone):
            windows = self._windows(backbone, device)
            ledger, seed = self.train_ledger, self.config.seed
            logger.info(f"taking patches of {len(self.train)} images, in windows of {self.size} pixels")
            memory = PatchMemory(self.train, windows, self.num_classes, settings, ledger, seed)
            return self._judge(windows, memory.score)

    def _windows(self, backbone: Backbone, device: torch.device) -> Windows:
        backbone.eval()
        return Windows(backbone, self.config.data, self.size, self.num_blocks, device, self.batch_size)

    def _judge(self, windows: Windows, score: Score) -> Confusion:
        """Every pixel of every readable image of `val` once, at the image's own size."""
        confusion, failures = Confusion(self.num_classes), list[Failure]()
        for index in range(len(self.val)):
            if index * TOLD // len(self.val) > (index - 1) * TOLD // len(self.val):
                logger.info(f"judging image {index + 1} of {len(self.val)}")
            pair, failed = self.val.read(index)
            failures += failed
            if pair is not None:
                self.val.check_ids(index, pair.mask, self.num_classes)
                confusion.add(windows.predict(pair.image, score), pair.mask)
            self.ledger.refuse_above(len(failures))
        self.ledger.exchange(failures)
        return confusion


def write_classes(path: Path, classes: list[ClassScore]) -> None:
    """A line per class: name, labelled pixels, IoU and accuracy, empty where there are none."""
    with replaced(path) as draft, draft.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("class", "pixels", "iou", "accuracy"))
        writer.writerows(["" if value is None else value for value in score] for score in classes)
