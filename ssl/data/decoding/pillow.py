"""What Pillow opens: whether it shows all that is stored, and which way is up."""

import numpy as np
from PIL import Image

from nestling.ssl.data.decoding import tiff
from nestling.ssl.data.decoding.raster import Raster, UndecodableError

ORIENTATION = 0x0112  # tag of EXIF and TIFF
PNG_COLORS = {2: "RGB", 4: "LA", 6: "RGBA"}  # by the colour type in a PNG's header


def load(image: Image.Image) -> tuple[int, bool]:
    """Decode the image; its orientation, and whether Pillow has turned it already."""
    if image.format != "TIFF":
        image.load()  # first, as the tag may stand behind the pixels
        return _orientation(image), False
    stored = _orientation(image)
    image.load()  # turns TIFF files alone, and forgets the tag
    return stored, _orientation(image) != stored


def deep(image: Image.Image, content: bytes, windowed: bool, unchanged: bool) -> Raster | None:
    """The numbers of a loaded image of more than 8 bits; None for one that Pillow's 8 bits show well.

    Raises:
        UndecodableError: they need a package that isn't there.
    """
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        return tiff.single_sample(image) if image.format == "TIFF" else _gray(image, unchanged)
    if not _is_deep_png(content):
        return None
    if windowed:  # Pillow keeps the upper 8 of 16 bits, in which a window would find little
        return Raster(_all_bits(content), PNG_COLORS[content[25]])
    if PNG_COLORS[content[25]] == "LA":  # which Pillow opens as RGBA
        return Raster(np.array(image)[:, :, [0, 3]], "LA")
    return None


def _gray(image: Image.Image, unchanged: bool) -> Raster:
    """One deep channel, and its opacity where one level is declared transparent."""
    pixels = np.array(image)[:, :, None]
    level = image.info.get("transparency")
    if unchanged or not isinstance(level, int):
        return Raster(pixels, "L")
    opaque = np.where(pixels == level, 0, 65535).astype(pixels.dtype)
    return Raster(np.concatenate([pixels, opaque], axis=2), "LA")


def _is_deep_png(content: bytes) -> bool:
    """By the header's bit depth and colour type."""
    return content.startswith(b"\x89PNG") and content[24] == 16 and content[25] in PNG_COLORS


def _all_bits(content: bytes) -> np.ndarray:
    try:
        import imagecodecs
    except ImportError as problem:
        raise UndecodableError(
            "has colours of 16 bits: for data.window run `pip install imagecodecs`"
        ) from problem
    return np.asarray(imagecodecs.png_decode(content))


def _orientation(image: Image.Image) -> int:
    """The value of the orientation tag; 1, upright, where there is none or it can't be read."""
    try:
        return image.getexif().get(ORIENTATION, 1)
    except Exception:  # cameras and editors write broken EXIF, and the pixels are none the worse for it
        return 1
