"""Training crops of images and their masks, as DINOv2's linear segmentation draws them.

Shapes used below: B crops, C channels, S the side of a crop, H x W pixels of an image.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

from nestling.ssl.config import Data
from nestling.ssl.data.channels import channels, normalisation
from nestling.ssl.data.failures import Failure
from nestling.ssl.data.workers import default_workers, end, following, loader_of, room_for, started
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.dense.folder import MaskedImages, Pair
from nestling.ssl.evaluation.dense.masks import IGNORED, resized_ids
from nestling.ssl.randomness import Stream, generator

SCALES = (0.5, 2.0)  # of the short side over S
# SSD's distortion of colours, each half of the time; torchvision's own swaps the channels too.
COLOURS = {
    "brightness": (0.875, 1.125),
    "contrast": (0.5, 1.5),
    "saturation": (0.5, 1.5),
    "hue": (-0.05, 0.05),
}
LARGEST_SHARE, TRIES = 0.75, 10  # no class should fill more of a crop; draws before it may


class Crops(NamedTuple):
    """Shape: images (B, C, S, S) uint8; masks (B, S, S) uint8; failures of images left out."""

    images: Tensor
    masks: Tensor
    failures: list[Failure]


def draw_crop(pair: Pair, size: int, fill: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Rescale, crop, flip and distort the colours, by torch's random numbers.

    The augmentation of mmsegmentation's ADE20K pipeline, which DINOv2 uses: the short side becomes 0.5 to 2
    times `size`, what is missing is `fill` (ignored in the mask), and a crop that one class fills by more
    than three quarters is drawn again. Colours are distorted where there are three channels.

    Shape:
        -> (C, S, S) uint8, (S, S) uint8
    """
    height, width = pair.mask.shape
    scale = size / min(height, width) * float(torch.empty(1).uniform_(*SCALES))
    high, wide = max(1, round(height * scale)), max(1, round(width * scale))
    pixels = torch.from_numpy(np.array(pair.image)).permute(2, 0, 1)
    image = tv_tensors.Image(v2.functional.resize(pixels, [high, wide], antialias=True))
    mask = tv_tensors.Mask(torch.from_numpy(np.array(resized_ids(pair.mask, high, wide))))
    filling = {tv_tensors.Image: list(fill), tv_tensors.Mask: IGNORED}
    crop = v2.RandomCrop(size, pad_if_needed=True, fill=filling)
    for _ in range(TRIES):
        cropped, ids = crop(image, mask)
        counts = torch.bincount(ids.flatten().long(), minlength=IGNORED + 1)[:IGNORED]
        if (counts > 0).sum() > 1 and counts.max() < LARGEST_SHARE * counts.sum():
            break
    changes = [v2.ColorJitter(**{name: span}) for name, span in COLOURS.items()] if len(fill) == 3 else []
    distort = [v2.RandomApply([change], p=0.5) for change in changes]
    cropped, ids = v2.Compose([v2.RandomHorizontalFlip(), *distort])(cropped, ids)
    return cropped.as_subclass(Tensor), ids.as_subclass(Tensor)


class _CropBatches(Dataset[Crops | UserError]):
    """(step, image) pairs -> crops: a pure function, whichever process runs it."""

    def __init__(self, pairs: MaskedImages, data: Data, num_classes: int, size: int, seed: int) -> None:
        self.pairs, self.num_classes, self.size, self.seed = pairs, num_classes, size, seed
        self.channels = channels(data)
        self.fill = [255 * value for value in normalisation(data)[0]]

    def __getitem__(self, wanted: list[tuple[int, int]]) -> Crops | UserError:
        try:
            drawn = [self._crop(*each) for each in wanted]
        except UserError as error:  # returned, as an exception would come back wrapped in a traceback
            return error
        failures = [failure for part, failed in drawn for failure in failed if part is None]
        crops = [part for part, _ in drawn if part is not None]
        images = room_for((len(wanted), self.channels, self.size, self.size))
        masks = room_for((len(wanted), self.size, self.size))
        for place, (image, ids) in enumerate(crops):
            images[place], masks[place] = image, ids
        return Crops(images[: len(crops)], masks[: len(crops)], failures)

    def _crop(self, step: int, index: int) -> tuple[tuple[Tensor, Tensor] | None, list[Failure]]:
        pair, failures = self.pairs.read(index)
        if pair is None:
            return None, failures
        self.pairs.check_ids(index, pair.mask, self.num_classes)
        seed = int(generator(self.seed, Stream.VIEWS, step, index).integers(2**63))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return draw_crop(pair, self.size, self.fill), []


def crop_batches(
    pairs: MaskedImages, data: Data, num_classes: int, size: int, batch_size: int, steps: int, seed: int
) -> Iterator[Crops]:
    """The batches of `steps` steps: one pass over the images after the other, each in an order of its own.

    Raises, while iterating:
        UserError: a mask is wrong, or an unreadable image stops the run.
    """
    batches = [
        [(step, index) for index in drawn]
        for step, drawn in enumerate(orders(len(pairs), batch_size, steps, seed))
    ]
    workers = default_workers() if data.num_workers is None else data.num_workers
    iterator = started(
        loader_of(_CropBatches(pairs, data, num_classes, size, seed), batches, workers, data.start_method)
    )
    try:
        for _ in batches:
            batch = following(iterator)
            if isinstance(batch, UserError):
                raise batch
            yield batch
    finally:
        end(iterator)


def orders(num_images: int, batch_size: int, steps: int, seed: int) -> list[list[int]]:
    """The images of each step; with more than there are images in a batch, some come twice."""
    passes = -(-steps * batch_size // num_images)
    drawn = np.concatenate(
        [generator(seed, Stream.ORDER, number).permutation(num_images) for number in range(passes)]
    )
    return drawn[: steps * batch_size].reshape(steps, batch_size).tolist()
