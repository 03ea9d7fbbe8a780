"""The view that evaluation sees: the centre of the image, at one size."""

import numpy as np
from PIL import Image


def eval_view(image: np.ndarray, size: int, crop_ratio: float = 0.875) -> np.ndarray:
    """Resize the short side to size / crop_ratio and keep the central square.

    Only what lands in the square is resampled, so a strip of 1 x 4000 pixels costs no more than
    any other image.

    Shape:
        image: (H, W, C) uint8
        returns: (C, size, size) uint8
    """
    height, width = image.shape[:2]
    short = max(size, round(size / crop_ratio))
    new_height = short if height <= width else int(short * height / width)
    new_width = short if width <= height else int(short * width / height)
    top, left = round((new_height - size) / 2), round((new_width - size) / 2)
    down, across = height / new_height, width / new_width  # source pixels per pixel
    box = (left * across, top * down, (left + size) * across, (top + size) * down)
    return np.ascontiguousarray(resized(image, size, size, box).transpose(2, 0, 1))


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
