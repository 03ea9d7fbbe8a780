"""Files of NumPy's own format, .npy, as images.

Shapes used below: H, W pixels, C channels.
"""

import io
import math
from collections.abc import Collection
from typing import BinaryIO

import numpy as np

from nestling.ssl.data.decoding.raster import Allow, UndecodableError

MAGIC = b"\x93NUMPY"


def read_npy(content: bytes, fitting: Collection[int], allow: Allow) -> np.ndarray:
    """The pixels, (H, W, C); `allow` is asked first, by the header. Pickled objects are never run.

    Raises:
        UndecodableError: objects, a shape that is no image's, or a file that ends too early.
    """
    stream = io.BytesIO(content)
    shape, dtype = _header(stream)
    if dtype.hasobject:
        raise UndecodableError("holds Python objects, not numbers")
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise UndecodableError(f"holds {dtype}, not real numbers of up to 8 bytes")
    if len(content) - stream.tell() < math.prod(shape) * dtype.itemsize:
        raise UndecodableError("is truncated")
    height, width = height_and_width(shape, fitting)
    allow(height, width, math.prod(shape) // (height * width))
    return channels_last(np.load(io.BytesIO(content), allow_pickle=False), fitting)


def npy_size(stream: BinaryIO, fitting: Collection[int]) -> tuple[int, int]:
    """Height and width from the header."""
    return height_and_width(_header(stream)[0], fitting)


def channels_last(pixels: np.ndarray, fitting: Collection[int]) -> np.ndarray:
    """(H, W), (H, W, C), or (C, H, W) where only that has a fitting number of channels, as (H, W, C)."""
    height_and_width(pixels.shape, fitting)
    if pixels.ndim == 2:
        return pixels[:, :, None]
    return np.moveaxis(pixels, 0, 2) if _channels_first(pixels.shape, fitting) else pixels


def height_and_width(shape: tuple[int, ...], fitting: Collection[int]) -> tuple[int, int]:
    """Of an array as `channels_last` sees it.

    Raises:
        UndecodableError: the shape is no image's.
    """
    if len(shape) not in (2, 3) or 0 in shape:
        raise UndecodableError(f"has the shape {shape}; (H, W), (H, W, C) or (C, H, W) would work")
    return shape[1:] if len(shape) == 3 and _channels_first(shape, fitting) else shape[:2]  # type: ignore[return-value]


def _channels_first(shape: tuple[int, ...], fitting: Collection[int]) -> bool:
    """Where neither end fits, it is still better to name the right number of channels as the wrong one."""
    looks_first = 4 * shape[0] <= min(shape[1:])
    return shape[2] not in fitting and (shape[0] in fitting or looks_first)


def _header(stream: BinaryIO) -> tuple[tuple[int, ...], np.dtype]:
    major, minor = np.lib.format.read_magic(stream)
    if major == 1:
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    elif major == 2:
        shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
    else:
        raise UndecodableError(
            f"is of version {major}.{minor} of the format .npy, which holds no plain numbers"
        )
    return shape, dtype
