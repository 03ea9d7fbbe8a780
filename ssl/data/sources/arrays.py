"""Images in one array: a `.npy` file, which is mapped into memory, or an `.npz` with labels beside them.

Shapes used below: N images, H x W pixels, C channels.
"""

import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np

from nestling.ssl.data.decoding.decoder import ARRAY_COLORS, Decoder
from nestling.ssl.data.decoding.npy import MAGIC, height_and_width
from nestling.ssl.data.decoding.raster import Reduction
from nestling.ssl.data.sources.base import ImageSource
from nestling.ssl.data.sources.shard_index import numbered
from nestling.ssl.errors import UserError
from nestling.ssl.names import printable

PREFIXES = {"train": ("train_",), "val": ("val_", "test_")}
PROBLEMS = (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error)  # of a file that isn't whole
LAYOUTS = "(N, H, W), (N, H, W, C) or (N, C, H, W)"


class ImageArray(ImageSource):
    """The images of a `.npy`, or of the arrays `images` and `labels` of an `.npz`.

    An `.npz` may also hold `train_images`, `val_images` or `test_images` and labels of the same names, as
    the files of MedMNIST do: `split` picks, "val" the test images where there are no others. Labels are
    whole numbers; where an image has several, they are left out.

    Shape:
        array: (N, H, W), (N, H, W, C), or (N, C, H, W) where only that fits; any real type

    Raises:
        UserError: the file can't be read, or an array is missing or of another shape or type.
    """

    def __init__(self, path: str, split: str, decoder: Decoder, key: str = "data.train") -> None:
        self.name = path
        self._file, self._decoder = os.path.abspath(path), decoder
        self._said = f"{key}={printable(path)}"
        self._array_name = None if path.lower().endswith(".npy") else self._chosen(split)
        self._images: np.ndarray | None = self._read(self._array_name)
        self._check(self._images)
        self._count = len(self._images)
        if self._array_name is not None:
            self._take_labels(self._array_name.replace("images", "labels"))

    def __len__(self) -> int:
        return self._count

    def path(self, index: int) -> str:
        """The file, then the array's name where it has one, then the number."""
        index = range(len(self))[index]
        return os.path.join(self._file, self._array_name or "", str(index))

    def load(self, index: int, reduction: Reduction | None = None) -> np.ndarray:
        return self._decoder.array(np.asarray(self._pixels()[index]), self.path(index))

    def sides(self, indices: np.ndarray) -> np.ndarray:
        return np.full(len(indices), min(self._size), dtype=np.int64)

    def __getstate__(self) -> dict[str, Any]:
        """Without the pixels: a spawned process opens the file itself."""
        return {**self.__dict__, "_images": None}

    def _pixels(self) -> np.ndarray:
        if self._images is None:
            self._images = self._read(self._array_name)
        return self._images

    def _chosen(self, split: str) -> str:
        """The array of images that the split means."""
        names = [f"{prefix}images" for prefix in PREFIXES[split]] + ["images"]
        found = self._names()
        chosen = next((name for name in names if name in found), None)
        if chosen is None:
            seen = ", ".join(map(printable, found)) or "none"
            raise UserError(f"{self._said} holds the arrays {seen}; name the images {' or '.join(names)}")
        return chosen

    def _names(self) -> list[str]:
        try:
            with self._opened(b"PK") as file, np.load(file, allow_pickle=False) as arrays:
                return list(arrays.files)
        except PROBLEMS as error:
            raise self._unreadable(error) from error

    def _read(self, array_name: str | None) -> np.ndarray:
        """The whole file, mapped, or one array of it; never by unpickling, which could run anything."""
        try:
            if array_name is None:
                with self._opened(MAGIC):
                    return np.load(self._file, mmap_mode="r", allow_pickle=False)
            with self._opened(b"PK") as file, np.load(file, allow_pickle=False) as arrays:
                return arrays[array_name]
        except PROBLEMS as error:
            raise self._unreadable(error) from error

    @contextmanager
    def _opened(self, magic: bytes) -> Iterator[BinaryIO]:
        """The file, if it begins as one of its kind does; else numpy would take it for something else."""
        with open(self._file, "rb") as file:
            if file.read(len(magic)) != magic:
                raise ValueError("its content is of another kind")
            file.seek(0)
            yield file

    def _unreadable(self, error: Exception) -> UserError:
        if isinstance(error, OSError) and error.strerror:
            return UserError(f"{self._said} can't be read: {error.strerror}")
        has_objects = "allow_pickle" in str(error) or "Python objects" in str(error)
        reason = "it holds Python objects" if has_objects else str(error)
        return UserError(f"{self._said} can't be read as an array: {reason}; write it by numpy.save or savez")

    def _check(self, images: np.ndarray) -> None:
        """An array of images, channels last."""
        shape, kind = images.shape, images.dtype
        if not isinstance(images, np.ndarray) or images.ndim not in (3, 4) or 0 in shape:
            raise UserError(f"{self._said} holds an array of shape {shape}; images have {LAYOUTS}")
        if kind.kind not in "buif":
            raise UserError(f"{self._said} holds values of type {kind}; images hold whole numbers or floats")
        unchanged = self._decoder.mode == "unchanged"
        fitting = (self._decoder.channels,) if unchanged else tuple(ARRAY_COLORS)
        found = {1} if images.ndim == 3 else {shape[3], shape[1]}
        if not found & set(fitting):
            asked = f"data.in_chans={fitting[0]}" if unchanged else f"data.mode={self._decoder.mode}"
            raise UserError(
                f"{self._said} has the shape {shape}, where {asked} takes {' or '.join(map(str, fitting))} "
                f"channels; images have {LAYOUTS}"
            )
        self._size = (shape[1], shape[2]) if images.ndim == 3 else height_and_width(shape[1:], fitting)

    def _take_labels(self, name: str) -> None:
        if name not in self._names():
            return
        labels = self._read(name)
        if len(labels.shape) == 2 and labels.shape[1] > 1:
            self.passed_over = f"the labels of shape {labels.shape}, as an image has several"
            return
        if labels.size != len(self) or labels.ndim not in (1, 2) or labels.dtype.kind not in "bui":
            raise UserError(
                f"{self._said}: {name} has shape {labels.shape} and type {labels.dtype}; {len(self)} images "
                f"have whole numbers of shape ({len(self)},) or ({len(self)}, 1)"
            )
        self.labels, self.class_names = numbered([str(int(label)) for label in labels.reshape(-1)])
