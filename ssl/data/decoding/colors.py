"""From the channels that a file holds to those that `data.mode` asks for.

Shapes used below: H, W pixels; n channels as stored, C as asked for.
"""

import numpy as np
from PIL import Image

from nestling.ssl.data.decoding.depth import Range, to_eight_bits
from nestling.ssl.data.decoding.raster import Raster, UndecodableError

Color = tuple[int, int, int]


def convert(image: Image.Image, mode: str, background: Color) -> np.ndarray:
    """A Pillow image of 8 bits as `mode` asks.

    Shape:
        returns: (H, W, C) uint8

    Raises:
        UndecodableError: its colours can't be converted.
    """
    if image.mode == "LAB":
        raise UndecodableError("has colours of the kind LAB, which is not supported")
    if mode == "unchanged":
        pixels = np.array(_with_own_channels(image))
        return pixels if pixels.ndim == 3 else pixels[:, :, None]
    if image.has_transparency_data:
        if image.mode == "La":  # premultiplied gray, which Pillow takes to RGBA by this way alone
            image = image.convert("LA")
        beneath = Image.new("RGBA", image.size, (*background, 255))
        image = Image.alpha_composite(beneath, image.convert("RGBA"))
    if image.mode not in ("1", "L", "RGB"):
        image = image.convert("RGB")
    wanted = "L" if mode == "gray" else "RGB"
    if image.mode != wanted:  # a copy takes longer than a small JPEG's decoding
        image = image.convert(wanted)
    pixels = np.array(image)  # a copy, as Pillow's own buffer is read-only
    return pixels[:, :, None] if mode == "gray" else pixels


def _with_own_channels(image: Image.Image) -> Image.Image:
    """Palettes as their colours, premultiplied colours divided again, padding dropped."""
    if image.mode in ("L", "LA", "RGB", "RGBA", "CMYK"):
        return image
    if image.mode in ("1", "La"):
        return image.convert({"1": "L", "La": "LA"}[image.mode])
    return image.convert("RGBA" if image.has_transparency_data else "RGB")


def finish(raster: Raster, mode: str, background: Color, window: Range | None) -> np.ndarray:
    """The same of pixels of any number type.

    Shape:
        returns: (H, W, C) uint8

    Raises:
        UndecodableError: values that can't be scaled, or channels that the mode can't take.
    """
    pixels = _eight_bits(raster, window)
    if mode == "unchanged":
        return pixels
    height, width, count = pixels.shape
    if not raster.colors:
        raise no_colors(count, mode)
    if raster.colors == {"rgb": "RGB", "gray": "L"}[mode]:
        return pixels
    if raster.colors == "L":
        return np.repeat(pixels, 3, axis=2)
    return convert(Image.frombytes(raster.colors, (width, height), pixels.tobytes()), mode, background)


def no_colors(count: int, mode: str) -> UndecodableError:
    """What is wrong with channels that a converting mode can't take, and what reads them."""
    found = f"has {count} channels"
    found += f", data.mode={mode} takes 1 to 4" if count > 4 else " that are not said to be colours"
    return UndecodableError(f"{found}: set data.mode=unchanged data.in_chans={count}")


def _eight_bits(raster: Raster, window: Range | None) -> np.ndarray:
    """Scaled; the window is for colours, opacity always keeps the range of its type."""
    pixels = raster.pixels
    window = None if raster.own_range else window
    has_alpha = raster.colors[-1:] in ("A", "a")
    scaled = to_eight_bits(pixels, None if has_alpha else window, raster.largest)
    colors = scaled[:, :, :-1] if has_alpha else scaled
    if has_alpha and window and scaled is not pixels:
        colors[...] = to_eight_bits(pixels[:, :, :-1], window, raster.largest)
    return np.bitwise_not(scaled) if raster.inverted else scaled
