"""From a file to upright 8-bit RGB: the one way in which any part of the package reads an image.

Transparency is laid over white; orientation tags are applied. Sixteen-bit images are scaled from
their full range. Float images in [0, 1] are scaled from that range; other floats and wider integers
from the smallest to the largest value of the image.
"""

import numpy as np
from PIL import Image, ImageOps

from nestling.ssl.errors import UserError

BACKGROUND = (255, 255, 255, 255)


def decode(path: str) -> np.ndarray:
    """Read one image.

    Shape:
        returns: (H, W, 3) uint8

    Raises:
        UserError: the file can't be read or decoded; names the path.
    """
    try:
        with Image.open(path) as image:
            return to_rgb(image)
    except Exception as problem:  # decoders raise anything from OSError to struct.error
        raise UserError(
            f"{path} can't be read as an image ({_in_one_line(problem)}); repair or replace it, then go on "
            "with resume=auto"
        ) from problem


def to_rgb(image: Image.Image) -> np.ndarray:
    """Any Pillow image as upright RGB, composited on white where it is transparent."""
    image.load()
    image = ImageOps.exif_transpose(image)
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        gray = to_eight_bits(np.asarray(image))
        return np.repeat(gray[:, :, None], 3, axis=2)
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, BACKGROUND), image.convert("RGBA"))
    return np.array(image.convert("RGB"))  # a copy, as Pillow's own buffer is read-only


def to_eight_bits(pixels: np.ndarray) -> np.ndarray:
    """Scale deep pixels to 0 … 255, so that no part of their range is clipped.

    Raises:
        ValueError: the pixels hold values that aren't finite.
    """
    values = pixels.astype(np.float64)
    if not np.isfinite(values).all():
        raise ValueError("it holds pixels that are not finite")
    low, high = values.min(), values.max()
    if pixels.dtype.kind == "f" and low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    elif pixels.dtype.kind != "f" and low >= 0 and high <= 65535:
        low, high = 0.0, 65535.0
    return np.round((values - low) * (255 / max(high - low, 1e-12))).astype(np.uint8)


def _in_one_line(problem: Exception) -> str:
    return " ".join(str(problem).split()) or type(problem).__name__
