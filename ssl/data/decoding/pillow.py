"""What Pillow opens: of which formats, whether it shows all that is stored, and which way is up."""

import io
from functools import lru_cache
from typing import BinaryIO

import numpy as np
from PIL import Image

from nestling.ssl.data.decoding import tiff
from nestling.ssl.data.decoding.raster import Raster, Reduction, UndecodableError

ORIENTATION = 0x0112  # tag of EXIF and TIFF
QUARTER_TURNS = (5, 6, 7, 8)  # its values that swap height and width
FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF", "JPEG2000", "PPM", "AVIF", "TGA")  # MPO is JPEG's
CODESTREAM = b"\xff\x4f\xff\x51"  # how the header of JPEG 2000's samples begins
PNG_COLORS = {2: "RGB", 4: "LA", 6: "RGBA"}  # by the colour type in a PNG's header


def open_image(stream: BinaryIO) -> Image.Image:
    """Open an image of `FORMATS`; content of others, as EPS, would start programs or is no picture.

    Raises:
        UnidentifiedImageError: it is of none of them.
    """
    return Image.open(stream, formats=_formats())


@lru_cache(maxsize=1)
def _formats() -> tuple[str, ...]:
    """Those that Pillow was built with."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def reduce(image: Image.Image, reduction: Reduction, oriented: bool) -> None:
    """Let a JPEG, not decoded yet, be decoded smaller; others stay, as they can't be for less."""
    if image.format not in ("JPEG", "MPO"):
        return
    width, height = image.size
    turned = oriented and _orientation(image) in QUARTER_TURNS
    factor = reduction(width, height) if turned else reduction(height, width)
    if factor > 1:
        image.draft(None, (width // factor, height // factor))


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
        UndecodableError: they need a package that isn't there, or a window that isn't for what Pillow reads.
    """
    if image.format == "PPM" and windowed:
        raster = _deep_pnm(image, content)
        if raster is not None:
            return raster
    if image.format == "JPEG2000" and windowed:
        _check_jpeg2000(image, content)
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        return tiff.single_sample(image) if image.format == "TIFF" else _gray(image, unchanged)
    if not _is_deep_png(content):
        return None
    colors = PNG_COLORS[content[25]]
    level = image.info.get("transparency")
    if colors == "RGB" and level is not None and not unchanged:  # Pillow finds it not in the upper 8 bits
        pixels = _all_bits(content, "a transparent colour of 16 bits")[:, :, :3]
        opaque = np.where((pixels == level).all(axis=2, keepdims=True), 0, 65535).astype(np.uint16)
        return Raster(np.concatenate([pixels, opaque], axis=2), "RGBA")
    if windowed:  # Pillow keeps the upper 8 of 16 bits, in which a window would find little
        pixels = _all_bits(content, "colours of 16 bits and data.window is set")
        return Raster(pixels[:, :, : len(colors)], colors)
    if colors == "LA":  # which Pillow opens as RGBA
        return Raster(np.array(image)[:, :, [0, 3]], "LA")
    return None


def _gray(image: Image.Image, unchanged: bool) -> Raster:
    """One deep channel, and its opacity where one level is declared transparent."""
    pixels = np.array(image)[:, :, None]
    if image.format in ("PNG", "PPM", "JPEG2000") and image.mode != "F":
        # 16 bits, which Pillow may hold in 32
        pixels = pixels.astype(np.uint16, copy=False)
    level = image.info.get("transparency")
    if unchanged or not isinstance(level, int):
        return Raster(pixels, "L")
    opaque = np.where(pixels == level, 0, 65535).astype(pixels.dtype)
    return Raster(np.concatenate([pixels, opaque], axis=2), "LA")


def _is_deep_png(content: bytes) -> bool:
    """By the header's bit depth and colour type."""
    return content.startswith(b"\x89PNG") and content[24] == 16 and content[25] in PNG_COLORS


def _deep_pnm(image: Image.Image, content: bytes) -> Raster | None:
    """The numbers of a PGM or PPM file as they are; None where Pillow has not scaled them."""
    if not content:  # a data set has opened the image, and may have loaded it
        if image.mode == "I":
            raise _no_window("a PGM file of more than 8 bits that a data set reads")
        return None
    with Image.open(io.BytesIO(content), formats=["PPM"]) as header:
        codec, _, offset, args = header.tile[0]
    if not isinstance(args, tuple) or args[1] <= 255:
        return None
    colors = args[0]
    if codec != "ppm":
        raise _no_window("a PGM or PPM file of more than 8 bits that is written as text")
    pixels = np.frombuffer(content, ">u2", image.width * image.height * len(colors), offset)
    return Raster(pixels.reshape(image.height, image.width, -1), colors)


def _check_jpeg2000(image: Image.Image, content: bytes) -> None:
    """Refuse samples that Pillow spreads over 16 bits or reduces to 8."""
    start = content.find(CODESTREAM)
    if 0 <= start < len(content) - 42:
        depth = (content[start + 42] & 127) + 1
        is_kept = depth <= 8 or (depth == 16 and image.mode == "I;16")
    else:  # a data set has opened the image
        depth, is_kept = 16, image.mode != "I;16"
    if not is_kept:
        raise _no_window(f"JPEG 2000 of {depth} bits")


def _no_window(to: str) -> UndecodableError:
    return UndecodableError(
        f"data.window can't be applied to {to}, whose values Pillow changes: save it as PNG or TIFF"
    )


def _all_bits(content: bytes, what: str) -> np.ndarray:
    try:
        import imagecodecs
    except ImportError as problem:
        raise UndecodableError(f"has {what}: run `pip install imagecodecs`") from problem
    return np.asarray(imagecodecs.png_decode(content))


def _orientation(image: Image.Image) -> int:
    """The value of the orientation tag; 1, upright, where there is none or it can't be read."""
    try:
        return image.getexif().get(ORIENTATION, 1)
    except Exception:  # cameras and editors write broken EXIF, and the pixels are none the worse for it
        return 1
