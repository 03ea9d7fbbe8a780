"""The view that evaluation sees: the centre of the image, at one size."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from PIL import Image


class View(Protocol):
    """What an evaluation makes of an image: always one size. It travels to loader processes."""

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""

    def __call__(self, image: np.ndarray, index: int) -> np.ndarray:
        """Shape: image (H, W, C) uint8, its index in the dataset -> (C, *size) uint8."""


@dataclass(frozen=True)
class Centre:
    """`eval_view` of a height and width."""

    size: tuple[int, int]
    crop_ratio: float = 0.875

    def __call__(self, image: np.ndarray, index: int) -> np.ndarray:
        return eval_view(image, self.size, self.crop_ratio)


def eval_view(image: np.ndarray, size: int | tuple[int, int], crop_ratio: float = 0.875) -> np.ndarray:
    """Resize the image to just cover size / crop_ratio and keep the centre of that size.

    For a square that is: the short side becomes size / crop_ratio. Only what lands in the view is
    resampled, so a strip of 1 x 4000 pixels costs no more than any other image.

    Shape:
        image: (H, W, C) uint8; size: the side, or (height, width)
        returns: (C, *size) uint8
    """
    high, wide = (size, size) if isinstance(size, int) else size
    height, width = image.shape[:2]
    cover_high, cover_wide = max(high, round(high / crop_ratio)), max(wide, round(wide / crop_ratio))
    if height * cover_wide <= width * cover_high:
        new_height, new_width = cover_high, max(cover_wide, int(cover_high * width / height))
    else:
        new_height, new_width = max(cover_high, int(cover_wide * height / width)), cover_wide
    top, left = round((new_height - high) / 2), round((new_width - wide) / 2)
    down, across = height / new_height, width / new_width  # source pixels per pixel
    box = (left * across, top * down, (left + wide) * across, (top + high) * down)
    return np.ascontiguousarray(resized(image, high, wide, box).transpose(2, 0, 1))


def resized(
    image: np.ndarray, height: int, width: int, box: tuple[float, float, float, float] | None = None
) -> np.ndarray:
    """Pillow's antialiased bicubic resize of a box (left, top, right, bottom), or of the whole image.

    Shape:
        image: (H, W, C) uint8 -> (height, width, C) uint8
    """
    if image.shape[2] == 3:
        return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC, box=box))
    planes = [  # one by one, as Pillow takes two or four channels for gray or colours and opacity
        np.asarray(Image.fromarray(plane).resize((width, height), Image.Resampling.BICUBIC, box=box))
        for plane in np.moveaxis(image, 2, 0)
    ]
    return np.stack(planes, axis=2)
