"""What readers of files hand to the decoder: numbers as stored, and what they mean."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

# How stored pixels become upright, by the value of the orientation tag (EXIF and TIFF alike):
# whether to mirror them left to right, then by how many quarters to turn them counterclockwise.
_UPRIGHT = {
    2: (True, 0),
    3: (False, 2),
    4: (True, 2),
    5: (True, 1),
    6: (False, 3),
    7: (True, 3),
    8: (False, 1),
}


# (height, width) of the upright image -> by how much, 1, 2, 4 or 8, it may be decoded smaller.
Reduction = Callable[[int, int], int]


class UndecodableError(Exception):
    """Why content can't be used, in a few words."""


class Allow(Protocol):
    """Asked before pixels are decoded: raises UndecodableError where there are too many of them."""

    def __call__(self, height: int, width: int, channels: int = 1) -> None: ...


class Raster(NamedTuple):
    """Pixels of any number type.

    Shape:
        pixels: (H, W, n)
    """

    pixels: np.ndarray
    colors: str  # L, LA, La, RGB, RGBA, RGBa or CMYK as Pillow names them; "" where nothing says it
    largest: int | None = None  # that the file's samples can hold, where their type could hold more
    inverted: bool = False  # 0 is white
    own_range: bool = False  # window is not for these values: they are colours of a palette


def upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Mirrored and turned as the value of an orientation tag asks; others than 2 to 8 ask for nothing."""
    mirror, quarters = _UPRIGHT.get(orientation, (False, 0))
    return np.rot90(pixels[:, ::-1] if mirror else pixels, quarters)


def as_stored(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """The inverse of `upright`: only the quarter turns are not their own."""
    return upright(pixels, {6: 8, 8: 6}.get(orientation, orientation))
