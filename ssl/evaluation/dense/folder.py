"""Images with a mask each: `images/…` and `masks/…`, matched by their path without its ending.

Shapes used below: H x W pixels of an image, C channels.
"""

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nestling.ssl.config import Data
from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.failures import Failure
from nestling.ssl.data.reading import Reader
from nestling.ssl.data.sources.folder import Folder
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.dense.masks import IGNORED, mask_size, read_mask
from nestling.ssl.names import printable

NAMES = "classes.txt"


class Pair(NamedTuple):
    """An image and its mask.

    Shape:
        image: (H, W, C) uint8; mask: (H, W) uint8
    """

    image: np.ndarray
    mask: np.ndarray


class MaskedImages:
    """The image and mask pairs below a folder, in the order of the images' names; picklable.

    With `zero_is_ignored` ids count from 1 and 0 is what no class covers, as in ADE20K: then 1 becomes 0.

    Raises:
        UserError: a part is missing, an image or a mask has no partner, two images would share one, or
            the sides of a pair differ.
    """

    def __init__(self, root: str, data: Data, key: str, zero_is_ignored: bool = False) -> None:
        self.name, self._key, self._zero_is_ignored = root, key, zero_is_ignored
        folder = Path(root).expanduser()
        for part in ("images", "masks"):
            if not (folder / part).is_dir():
                raise UserError(
                    f"{key}={printable(root)} holds no folder {part}; "
                    "put images in images/ and their masks, PNGs of class ids, in masks/ under the same names"
                )
        decoder = Decoder.of(data)
        self.images = Folder(str(folder / "images"), decoder, f"{key}/images", data.cache)
        self._reader = Reader(self.images, data)
        self.masks = self._matched(folder)
        self._check_sizes(decoder)

    def __len__(self) -> int:
        return len(self.masks)

    def read(self, index: int) -> tuple[Pair | None, list[Failure]]:
        """One pair, or None where the image can't be read, with its failure.

        Raises:
            UserError: the mask can't be read or has another size, or an unreadable image stops the run.
        """
        image, failures, _ = self._reader.read(index)
        if image is None:
            return None, failures
        mask = self.mask(index)
        if mask.shape != image.shape[:2]:
            raise UserError(self._misfit(index, mask.shape, image.shape))
        return Pair(image, mask), failures

    def mask(self, index: int) -> np.ndarray:
        """Shape: -> (H, W) uint8."""
        ids = read_mask(self.masks[index])
        if self._zero_is_ignored:
            return np.where((ids == 0) | (ids == IGNORED), IGNORED, ids - 1).astype(np.uint8)
        return ids

    def count_classes(self) -> int:
        """One more than the largest id, from a look at all masks."""
        largest = -1
        for index in range(len(self)):
            ids = self.mask(index)
            largest = max(largest, int(np.where(ids == IGNORED, -1, ids.astype(np.int16)).max()))
        if largest < 0:
            raise UserError(
                f"{self._key}={printable(self.name)}: every pixel of the masks is {IGNORED}, ignored"
            )
        return largest + 1

    def check_ids(self, index: int, mask: np.ndarray, num_classes: int) -> None:
        """Raises UserError for an id beyond the classes, naming the mask."""
        beyond = mask[(mask >= num_classes) & (mask != IGNORED)]
        if beyond.size:
            shift = int(self._zero_is_ignored)
            raise UserError(
                f"the mask {printable(self.masks[index])} holds class {int(beyond[0]) + shift}, and there "
                f"are {num_classes} classes ({shift} to {num_classes - 1 + shift}); "
                f"set num_classes, or mark such pixels {IGNORED}"
            )

    def _matched(self, folder: Path) -> list[str]:
        """The mask of each image."""
        files = [path for path in sorted((folder / "masks").rglob("*")) if path.suffix.lower() == ".png"]
        masks = {stem(path, folder / "masks"): str(path) for path in files if not path.name.startswith(".")}
        stems = [stem(self.images.path(index), folder / "images") for index in range(len(self.images))]
        shown = f"{self._key}={printable(self.name)}"
        if len(set(stems)) < len(stems):
            twice = [name for name, count in Counter(stems).items() if count > 1]
            raise UserError(f"{shown}: several images have the same name but for the ending: {some(twice)}")
        lonely, idle = [name for name in stems if name not in masks], sorted(set(masks) - set(stems))
        if lonely or idle:
            raise UserError(
                f"{shown}: {len(lonely)} images without a mask ({some(lonely)}), {len(idle)} masks without "
                f"an image ({some(idle)}); images/NAME.jpg belongs to masks/NAME.png"
            )
        return [masks[name] for name in stems]

    def _check_sizes(self, decoder: Decoder) -> None:
        """Before the work, by the headers, which say nothing of how an image is turned."""
        for index, path in enumerate(self.masks):
            size, stored = mask_size(path), decoder.size(self.images.path(index))
            if stored is not None and sorted(size) != sorted(stored):
                raise UserError(self._misfit(index, size, stored))

    def _misfit(self, index: int, mask: tuple[int, ...], image: tuple[int, ...]) -> str:
        return (
            f"the mask {printable(self.masks[index])} has {mask[1]} x {mask[0]} pixels and its image "
            f"{printable(self.images.path(index))} {image[1]} x {image[0]}; make them the same size"
        )


def stem(path: str | Path, root: Path) -> str:
    """The path below a root, without its ending."""
    return os.path.splitext(os.path.relpath(path, root))[0]


def some(names: Iterable[str]) -> str:
    """The first few."""
    names = list(names)
    return ", ".join([*map(printable, names[:3]), *(["…"] if len(names) > 3 else [])]) or "none"


def class_names(pairs: MaskedImages, num_classes: int | None = None) -> list[str]:
    """The lines of classes.txt, where there is one: line i names class i; else the numbers.

    Without either the masks are counted.

    Raises:
        UserError: it is no text in UTF-8, or names another number of classes than asked for.
    """
    file = Path(pairs.name).expanduser() / NAMES
    if not file.is_file():
        return [str(number) for number in range(num_classes or pairs.count_classes())]
    names = [line.strip() for line in read_text(file).splitlines() if line.strip()]
    if num_classes not in (None, len(names)):
        raise UserError(
            f"{printable(file)} names {len(names)} classes and num_classes={num_classes}; make them agree"
        )
    return names


def read_text(file: Path) -> str:
    """What a list of names says.

    Raises:
        UserError: it can't be read, or is no text in UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{printable(file)} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        found = f"byte {error.start + 1} is 0x{error.object[error.start]:02x}"
        raise UserError(f"{printable(file)} is no text in UTF-8 ({found}); save it as UTF-8") from error
