"""The images of a fine-tuning: which there are, in which order, and how each is varied.

Shapes used below: B images of a batch, C channels, S pixels of a side, K classes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2

from nestling.ssl.data.loader import EvalBatch
from nestling.ssl.data.order import epoch_order
from nestling.ssl.data.sources.base import ImageSource, Subset
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.finetuning.settings import Augment
from nestling.ssl.evaluation.labels import matched_labels, refuse_shared_files
from nestling.ssl.evaluation.linear.choice import repeats_of, split_by_class
from nestling.ssl.names import printable
from nestling.ssl.randomness import Stream, generator
from nestling.ssl.views.plan import TRIES, draw_box
from nestling.ssl.views.render import resize_large

COLORED = (1, 3)  # channels that the colour operations take


@dataclass(frozen=True)
class Labelled:
    """Images and the class of each, -1 never.

    Shape:
        labels: (N,) int64
    """

    source: ImageSource
    labels: Tensor


@dataclass(frozen=True)
class Sets:
    """What is trained on, what chooses the epoch where anything does, what is judged on."""

    train: Labelled
    choice: Labelled | None
    val: Labelled
    class_names: list[str]


def sets_of(train: ImageSource, val: ImageSource | None, choose: float, seed: int) -> Sets:
    """Classes by name from training; judged images of other classes are left out.

    The share `choose` of each class's training images chooses the epoch.

    Raises:
        UserError: a side has no labels, or shares no class or a file with the other; no class has an image
            to choose by.
    """
    for source, said in ((train, "data.train"), (val, "data.val")):
        if source is None or source.labels is None:
            name = "" if source is None else f"={printable(source.name)}"
            raise UserError(
                f"fine-tuning needs labelled images and {said}{name} has none; give folders of class "
                "folders, or lists with labels"
            )
    assert val is not None
    train_labels, val_labels, names = matched_labels(train, val)
    refuse_shared_files(train, val)
    known = np.flatnonzero(val_labels >= 0)
    judged = Labelled(Subset(val, known), torch.from_numpy(val_labels[known]))
    if not choose:
        return Sets(Labelled(train, torch.from_numpy(train_labels)), None, judged, names)
    parts = split_by_class(train_labels, choose, seed, repeats_of(train))
    if not len(parts[1]):
        raise UserError(
            f"train.choose_on_train={choose} finds no class with two images or more in "
            f"data.train={printable(train.name)}; set it to 0, and the last epoch counts"
        )
    learned, held = (Labelled(Subset(train, part), torch.from_numpy(train_labels[part])) for part in parts)
    return Sets(learned, held, judged, names)


@dataclass(frozen=True)
class TrainingView:
    """A random resized crop, flipped, changed and erased: a function of (seed, epoch, index) alone."""

    size: tuple[int, int]
    augment: Augment
    fill: tuple[int, ...]  # per channel, what is moved into the image and what erases it
    seed: int
    epoch: int

    def __call__(self, image: np.ndarray, index: int) -> np.ndarray:
        """Shape: image (H, W, C) uint8 -> (C, S, S) uint8."""
        random = generator(self.seed, Stream.VIEWS, self.epoch, index)
        *uniform, flip = random.random(4 * TRIES + 1).tolist()
        height, width = image.shape[:2]
        top, left, h, w = draw_box(uniform, height, width, self.augment.scale, self.augment.ratio)
        crop = image[top : top + h, left : left + w]
        pixels = torch.from_numpy(resize_large(crop, self.size, flip < self.augment.flip))
        # torchvision draws from torch's own generator, which is put back afterwards.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(random.integers(2**62)))
            for change in self._changes():
                pixels = change(pixels)
        return pixels.numpy()

    def _changes(self) -> list[Callable[[Tensor], Tensor]]:
        found: list[Callable[[Tensor], Tensor]] = []
        augment, fill = self.augment, list(self.fill)
        if augment.colors == "randaugment":
            bilinear = v2.InterpolationMode.BILINEAR  # rotating tensors knows no bicubic
            found.append(
                v2.RandAugment(augment.num_ops, augment.magnitude, interpolation=bilinear, fill=fill)
            )
        elif augment.colors == "jitter":
            found.append(v2.ColorJitter(augment.jitter, augment.jitter, augment.jitter))
        if augment.erasing:
            found.append(v2.RandomErasing(augment.erasing, value=fill))
        return found


def refuse_colors(augment: Augment, channels: int) -> None:
    """Raise UserError where colours can't be changed, as the images have none."""
    if augment.colors != "none" and channels not in COLORED:
        raise UserError(
            f"augment.colors={augment.colors} takes images of 1 or 3 channels, not {channels}; "
            "set augment.colors=none"
        )


def steps_per_epoch(num_images: int, batch_size: int, num_processes: int) -> int:
    """Whole global batches of an epoch; the rest waits for the next epoch's other order.

    Raises:
        UserError: not even one is full.
    """
    steps = num_images // (batch_size * num_processes)
    if not steps:
        raise UserError(
            f"{num_images} training images don't fill one step of train.batch_size={batch_size} x "
            f"{num_processes} processes; lower train.batch_size to at most {num_images // num_processes}"
        )
    return steps


def order_of(source: ImageSource, seed: int, epoch: int, length: int, window: int) -> list[int]:
    """The first `length` images of an epoch, in its order."""
    order = epoch_order(len(source), seed, epoch, source.blocks, window)
    return [int(index) for index in order[:length]]


def filled(batch: EvalBatch, batch_size: int) -> tuple[Tensor, Tensor]:
    """The indices and images of a batch; its readable images stand in for the unreadable ones, in turn.

    So every process has images at every step.

    Shape:
        -> (batch_size,) int64, (batch_size, C, S, S) uint8

    Raises:
        UserError: none can be read.
    """
    if not len(batch.indices):
        raise UserError(f"no image of a batch can be read, such as {batch.failures[0]}")
    if len(batch.indices) == batch_size:
        return batch.indices, batch.images
    places = torch.arange(batch_size) % len(batch.indices)
    return batch.indices[places], batch.images[places]


class Mixing:
    """Mixup (Zhang et al., 2018), CutMix (Yun et al., 2019), one of both at random, or plain one-hot labels.

    It draws from torch's generator, so whoever seeds that by the step makes it a function of the step.
    """

    def __init__(self, augment: Augment, num_classes: int) -> None:
        self.num_classes = num_classes
        ways = [
            way(alpha=alpha, num_classes=num_classes)
            for way, alpha in ((v2.MixUp, augment.mixup), (v2.CutMix, augment.cutmix))
            if alpha
        ]
        self._mix = v2.RandomChoice(ways) if ways else None

    def __call__(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Shape: images (B, C, S, S) float, labels (B,) -> the same mixed, (B, K) that sum to 1."""
        if self._mix is None:
            return images, torch.nn.functional.one_hot(labels, self.num_classes).float()
        return self._mix(images, labels)
