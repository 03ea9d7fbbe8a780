"""What a probe is given: a frozen backbone, two labelled sets of images, and how they are read.

Shapes used below: B images, C channels, S pixels of a side, D channels of a read-out.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nestling.backbones import Features
from nestling.ssl.config import Data
from nestling.ssl.data.channels import channels, normalisation
from nestling.ssl.data.ledger import Ledger
from nestling.ssl.data.loader import EvalLoader
from nestling.ssl.data.sources.base import ImageSource, Subset
from nestling.ssl.data.workers import default_workers
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.labels import matched_labels, refuse_shared_files
from nestling.ssl.evaluation.linear.settings import Linear
from nestling.ssl.evaluation.readouts import Readout, last_blocks, readout
from nestling.ssl.names import printable
from nestling.ssl.run.loading import check_size
from nestling.ssl.trained import Trained
from nestling.ssl.views.evaluation import Centre
from nestling.ssl.views.render import normalize

log = logging.getLogger("nestling")

LAST_BLOCK = ("cls", "cls+mean_patch")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Task:
    """A probe's inputs, alike on all processes but for `process`.

    `val` are the images it is tested on, of classes that training has. `block_widths` are those of as many
    last blocks as the read-outs take, the last block's last.
    """

    trained: Trained
    settings: Linear
    train: ImageSource
    val: ImageSource
    train_labels: np.ndarray
    val_labels: np.ndarray
    class_names: list[str]
    num_unknown: int  # test images of classes that training lacks
    readouts: list[Readout]
    block_widths: list[int]
    view: Centre
    ledger: Ledger
    device: torch.device
    process: int
    num_processes: int

    @property
    def widths(self) -> dict[str, int]:
        """The D of each read-out."""
        fakes = [
            Features(torch.empty(1, width), torch.empty(1, 1, width), (1, 1)) for width in self.block_widths
        ]
        return {wanted.name: wanted(fakes).shape[1] for wanted in self.readouts}

    @property
    def data(self) -> Data:
        return self.trained.config.data

    @property
    def autocast(self) -> torch.dtype | None:
        return DTYPES.get(self.settings.precision)

    @property
    def num_workers(self) -> int:
        return default_workers() if self.data.num_workers is None else self.data.num_workers

    def labels_of(self, side: str, indices: Tensor) -> Tensor:
        """Shape: (B,) indices of a side, train or val -> (B,)."""
        return torch.from_numpy(self.train_labels if side == "train" else self.val_labels)[indices.cpu()]

    def source(self, side: str) -> ImageSource:
        """The images of a side, train or val."""
        return self.train if side == "train" else self.val

    def centre_views(self, side: str, indices: np.ndarray | None = None) -> EvalLoader:
        """This process's share of a side's images, or of those among them, as evaluation sees them."""
        return EvalLoader(
            self.source(side),
            self.data,
            self.view,
            batch_size=self.settings.images_per_pass,
            process=self.process,
            num_processes=self.num_processes,
            num_workers=self.num_workers,
            ledger=self.ledger,
            order=None if indices is None else indices.tolist(),
        )

    def vectors(self, images: Tensor) -> dict[str, Tensor]:
        """What the heads read. The caller has the backbone in evaluation mode, without gradients.

        Shape:
            (B, C, S, S) uint8 -> {readout: (B, D)} float32
        """
        pixels = normalize(images.to(self.device, non_blocking=True), *normalisation(self.data))
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            blocks = last_blocks(self.trained.backbone, pixels, self.readouts)
        return {wanted.name: wanted(blocks) for wanted in self.readouts}


def prepared(
    trained: Trained,
    train: ImageSource,
    val: ImageSource | None,
    settings: Linear,
    device: torch.device,
    process: int = 0,
    num_processes: int = 1,
) -> Task:
    """Check all that can be wrong before the work, and move the backbone to its device.

    Raises:
        UserError: no labels, no class in common, the same file on both sides, an unknown read-out, a size
            that the network can't take, or the precision can't be had.
    """
    for source, key in ((train, "data.train"), (val, "data.val")):
        if source is None or source.labels is None:
            found = (
                f"data.train={printable(train.name)} has none to hold out"
                if source is None
                else (f"{key}={printable(source.name)} has none")
            )
            raise UserError(
                f"a linear probe needs labels and {found}; give data.train and data.val, such as folders of "
                "class folders, or lists with labels"
            )
    assert val is not None
    if settings.precision == "fp16" and device.type == "cpu":
        raise UserError("linear.precision=fp16 needs a GPU and none is used; bf16 and fp32 work here")
    size = settings.size or trained.size
    check_size(trained.backbone, size, "linear.size")
    train_labels, val_labels, class_names = matched_labels(train, val)
    refuse_shared_files(train, val)
    known = np.flatnonzero(val_labels >= 0)
    trained.backbone.to(device)
    readouts, widths = shown(trained, settings.readouts, size, device)
    return Task(
        trained=trained,
        settings=settings,
        train=train,
        val=Subset(val, known),
        train_labels=train_labels,
        val_labels=val_labels[known],
        class_names=class_names,
        num_unknown=len(val) - len(known),
        readouts=readouts,
        block_widths=widths,
        view=Centre((size, size), settings.crop_ratio or trained.config.knn.crop_ratio),
        ledger=Ledger(trained.config.data.max_bad_share, len(train) + len(val)),
        device=device,
        process=process,
        num_processes=num_processes,
    )


def shown(
    trained: Trained, names: Sequence[str] | None, size: int, device: torch.device
) -> tuple[list[Readout], list[int]]:
    """The read-outs, by default DINOv2's four as far as the network shows them, and the last blocks' widths.

    Raises:
        UserError: a name is none, or the network shows fewer blocks than one asks for.
    """
    image = torch.zeros(1, channels(trained.config.data), size, size, device=device)
    wanted = [readout(name) for name in dict.fromkeys(names or (*LAST_BLOCK, *_of_four()))]
    try:
        blocks = _blocks(trained, image, wanted)
    except UserError:
        if names:
            raise
        log.info(f"{trained.config.backbone.name} does not show its last 4 blocks: heads read the last alone")
        wanted = [readout(name) for name in LAST_BLOCK]
        blocks = _blocks(trained, image, wanted)
    return wanted, [block.cls.shape[1] for block in blocks]


def _of_four() -> list[str]:
    return [f"last4:{name}" for name in LAST_BLOCK]


def _blocks(trained: Trained, image: Tensor, readouts: Sequence[Readout]) -> list[Features]:
    with torch.no_grad():
        return last_blocks(trained.backbone, image, readouts)
