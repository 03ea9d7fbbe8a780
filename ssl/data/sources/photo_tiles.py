"""The embedded data set: 32-pixel tiles of photographs that come with two common packages.

The label of a tile is the photograph it was cut from. Validation tiles come from the last quarter
of the columns and training tiles from the rest, so no pixel is in both. The 19 images are those of
the two packages that state a licence (CC0, CC BY or public domain) and are no drawn test pattern.
"""

import importlib.util
import os
from dataclasses import dataclass

import numpy as np
from PIL import Image

from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.decoding.raster import Reduction
from nestling.ssl.data.sources.base import ImageSource
from nestling.ssl.errors import UserError
from nestling.ssl.randomness import Stream, generator

TILE = 32  # pixels
COUNTS = {"train": 200, "val": 50}  # tiles per photograph
SEED = 0  # of the positions: the data set's own, so that every run sees the same tiles
RGB = Decoder()
MIN_CONTRAST = 4.0  # standard deviation of gray levels below which a tile shows nothing


@dataclass(frozen=True)
class Photograph:
    """A file of an installed package."""

    name: str
    package: str
    file: str


def _photographs(package: str, folder: str, files: str) -> tuple[Photograph, ...]:
    return tuple(Photograph(os.path.splitext(file)[0], package, f"{folder}/{file}") for file in files.split())


PHOTOGRAPHS = _photographs(
    "skimage",
    "data",
    "astronaut.png brick.png camera.png cell.png chelsea.png clock_motion.png coffee.png coins.png grass.png "
    "gravel.png horse.png hubble_deep_field.jpg ihc.png microaneurysms.png retina.jpg rocket.jpg text.png",
) + _photographs("sklearn", "datasets/images", "china.jpg flower.jpg")


class PhotoTiles(ImageSource):
    """200 training or 50 validation tiles of each photograph, in the order of the photographs.

    Raises:
        UserError: a package or one of its photographs is not installed.
    """

    name = "photo-tiles"

    def __init__(self, split: str, decoder: Decoder = RGB) -> None:
        self.split, self._decoder = split, decoder
        self.class_names = [photo.name for photo in PHOTOGRAPHS]
        self._tiles = np.concatenate([_tiles(number, split) for number in range(len(PHOTOGRAPHS))])
        self.labels = np.repeat(np.arange(len(PHOTOGRAPHS), dtype=np.int64), COUNTS[split])

    def __len__(self) -> int:
        return len(self._tiles)

    def path(self, index: int) -> str:
        index = range(len(self))[index]
        label, number = divmod(index, COUNTS[self.split])
        return f"photo-tiles/{self.split}/{PHOTOGRAPHS[label].name}/{number:03d}"

    def load(self, index: int, reduction: Reduction | None = None) -> np.ndarray:
        return self._decoder.array(self._tiles[index], self.path(index))

    def sides(self, indices: np.ndarray) -> np.ndarray:
        return np.full(len(indices), TILE)


def photograph(name: str) -> np.ndarray:
    """One whole photograph by its name, (H, W, 3) uint8.

    Raises:
        UserError: the name is unknown, or its package is not installed.
    """
    for photo in PHOTOGRAPHS:
        if photo.name == name:
            return RGB.file(_file_of(photo))
    raise UserError(f"no photograph {name!r}; there are {', '.join(photo.name for photo in PHOTOGRAPHS)}")


def _file_of(photo: Photograph) -> str:
    """Where the file lies, without importing its package, which takes seconds."""
    spec = importlib.util.find_spec(photo.package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        file = os.path.join(folder, photo.file)
        if os.path.isfile(file):
            return file
    raise UserError(
        f"photo-tiles needs {photo.file} of the package {photo.package}, which is not installed: "
        "run `pip install nestling[demo]`, or set data.train to a folder of images"
    )


def _tiles(number: int, split: str) -> np.ndarray:
    """The tiles of one photograph: the first of all positions, shuffled, that show something.

    Shape:
        returns: (count, TILE, TILE, 3) uint8
    """
    region = _region(photograph(PHOTOGRAPHS[number].name), split)
    gray = region.mean(axis=2, dtype=np.float32)
    rows, columns = region.shape[0] - TILE + 1, region.shape[1] - TILE + 1
    shuffled = generator(SEED, Stream.TILES, number, list(COUNTS).index(split)).permutation(rows * columns)
    kept: list[np.ndarray] = []
    for position in shuffled:
        top, left = divmod(int(position), columns)
        if gray[top : top + TILE, left : left + TILE].std() >= MIN_CONTRAST:
            kept.append(region[top : top + TILE, left : left + TILE])
            if len(kept) == COUNTS[split]:
                break
    return np.stack(kept)


def _region(photo: np.ndarray, split: str) -> np.ndarray:
    """The columns of a split: the last quarter for validation, the others for training."""
    cut = photo.shape[1] - photo.shape[1] // 4
    region = photo[:, cut:] if split == "val" else photo[:, :cut]
    if photo.shape[1] // 4 < TILE:  # too narrow a quarter: both splits are enlarged alike
        scale = -(-TILE // (photo.shape[1] // 4))
        size = (region.shape[1] * scale, region.shape[0] * scale)
        region = np.array(Image.fromarray(region).resize(size, Image.Resampling.BICUBIC))
    return region
