"""TIFF files that Pillow can't read, or reads as something else: many bands, planes, deep colours.

Pillow leaves compressed files to libtiff, which prints to the standard error what is wrong with a damaged
one, without its name. Where imagecodecs is installed, compressed gray and RGB files go through
tifffile instead, which prints nothing; for others, as those of palettes or JPEG, the lines stay.

Shapes used below: H, W pixels; n samples per pixel, or pages.
"""

import io
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, TiffImagePlugin

from nestling.ssl.data.decoding.raster import Allow, Raster, UndecodableError

if TYPE_CHECKING:
    from tifffile import TiffFile, TiffPage

MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
SAMPLES, BITS, FORMAT, PLANES, PHOTOMETRIC, ORIENTATION = 277, 258, 339, 284, 262, 274  # tags
VOLUME = 32997  # tag: how many images deep
QUIET_BY_TIFFFILE = {"tiff_lzw", "tiff_adobe_deflate", "tiff_deflate"}  # Pillow's names
WHITE_IS_ZERO, BLACK_IS_ZERO, IS_RGB, IS_PALETTE, IS_CMYK = 0, 1, 2, 3, 5  # values of PHOTOMETRIC
UNSIGNED, SIGNED = 1, 2  # values of FORMAT
PREMULTIPLIED, ALPHA = 1, 2  # kinds of extra samples


def is_for_tifffile(image: Image.Image, unchanged: bool, bands: int, windowed: bool) -> bool:
    """Whether Pillow, which has opened the image, would lose samples, bits or signs of it, or be loud."""
    assert isinstance(image, TiffImagePlugin.TiffImageFile)
    tags = image.tag_v2
    samples, bits = tags.get(SAMPLES, 1), set(tags.get(BITS, (1,)))
    plain = tags.get(PHOTOMETRIC) in (WHITE_IS_ZERO, BLACK_IS_ZERO, IS_RGB)
    if plain and bits == {8} and image.info.get("compression") in QUIET_BY_TIFFFILE and _has_imagecodecs():
        return True
    if tags.get(VOLUME, 1) > 1:
        return True
    if samples == 1:
        if windowed and plain and bits <= {2, 4}:  # which Pillow spreads over 8 bits
            return True
        unsigned = tags.get(FORMAT, (UNSIGNED,))[0] == UNSIGNED
        return (bits == {32} and unsigned) or (unchanged and bands > 1 and image.n_frames == bands)
    lost = unchanged and samples != len(image.getbands())
    return samples > 4 or tags.get(PLANES, 1) == 2 or bits != {8} or lost


def single_sample(image: Image.Image) -> Raster:
    """One deep sample per pixel, which Pillow has loaded.

    `tag_v2` still holds the format of the samples, of which Pillow's modes keep only some.
    """
    assert isinstance(image, TiffImagePlugin.TiffImageFile)
    pixels, tags = np.array(image)[:, :, None], image.tag_v2
    bits = tags.get(BITS, (1,))[0]
    if bits <= 16 and pixels.dtype.kind != "f":
        signed = tags.get(FORMAT, (UNSIGNED,))[0] == SIGNED
        pixels = pixels.astype(np.int16 if signed else np.uint16, copy=False)
    return Raster(pixels, "L", _largest(bits), tags.get(PHOTOMETRIC) == WHITE_IS_ZERO)


def read_tiff(content: bytes, bands: int, allow: Allow) -> tuple[Raster, int]:
    """The first page and its orientation; where it has one sample and there are `bands` pages, all of them.

    `allow` is asked before pixels are decoded.

    Raises:
        UndecodableError: it is damaged, of an unknown kind, or its compression needs a package.
    """
    from tifffile import TiffFile

    with TiffFile(io.BytesIO(content)) as file:
        pages = _pages(file, bands)
        first = pages[0]
        samples = 3 if first.photometric == IS_PALETTE else first.samplesperpixel * len(pages)
        allow(first.imagelength, first.imagewidth, samples)
        if any(page.shape != first.shape or page.dtype != first.dtype for page in pages):
            raise UndecodableError("has pages of different sizes or types")
        pixels = np.concatenate([_pixels(page, len(content)) for page in pages], axis=2)
        orientation = first.tags.valueof(ORIENTATION, 1)
        raster = Raster(pixels, "", _largest(first.bitspersample), first.photometric == WHITE_IS_ZERO)
        return (raster if len(pages) > 1 else _with_colors(raster, first)), orientation


def tiff_size(stream: Any) -> tuple[int, int]:
    """Height and width of the first page, from its header."""
    from tifffile import TiffFile

    with TiffFile(stream) as file:
        page = _pages(file, 1)[0]
        return page.imagelength, page.imagewidth


def _pages(file: "TiffFile", bands: int) -> "list[TiffPage]":
    """The first page, or all where they are bands."""
    from tifffile import TiffPage

    first = file.pages.first
    assert isinstance(first, TiffPage)
    if not first.imagelength * first.imagewidth:
        raise UndecodableError("is a TIFF file that is damaged or of an unknown kind")
    if bands > 1 and first.samplesperpixel == 1 and len(file.pages) == bands:
        return [page.aspage() for page in file.pages]
    return [first]


def _pixels(page: "TiffPage", length: int) -> np.ndarray:
    """One page of a file of that length, (H, W, n)."""
    if page.axes not in ("YX", "YXS", "SYX"):
        raise UndecodableError(f"has the axes {page.axes}, not height, width and samples")
    if page.dtype is None or page.dtype.kind not in "biuf":
        raise UndecodableError(f"holds {page.dtype}, not real numbers")
    ends = [start + count for start, count in zip(page.dataoffsets, page.databytecounts, strict=True)]
    if max(ends, default=0) > length:
        raise UndecodableError("is truncated")
    try:
        pixels = page.asarray()
    except (ValueError, KeyError) as problem:
        if "imagecodecs" not in str(problem):
            raise
        compression = getattr(page.compression, "name", page.compression)
        needs = f"is compressed by {compression}"
        if page.compression == 1:
            needs = f"has samples of {page.bitspersample} bits"
        raise UndecodableError(f"{needs}: run `pip install imagecodecs`") from problem
    if page.axes == "SYX":
        return np.moveaxis(pixels, 0, 2)
    return pixels[:, :, None] if page.axes == "YX" else pixels


def _largest(bits: int) -> int | None:
    """The largest value of samples of so many bits, where a type of more bits holds them.

    One bit is two levels, which have a type of their own. Above 16 tifffile names 565 where the samples
    differ, and gives these in 8 bits.
    """
    return 2**bits - 1 if 1 < bits < 16 and bits != 8 else None


@lru_cache(maxsize=1)
def _has_imagecodecs() -> bool:
    return find_spec("imagecodecs") is not None


def _with_colors(raster: Raster, page: "TiffPage") -> Raster:
    """What the samples mean, as far as the file says so."""
    pixels, samples = raster.pixels, page.samplesperpixel
    extra = tuple(int(kind) for kind in page.extrasamples)
    photometric = int(page.photometric)
    if photometric == IS_PALETTE and page.colormap is not None:
        return Raster(page.colormap.T[pixels[:, :, 0]], "RGB", own_range=True)
    if photometric == IS_CMYK and samples == 4:
        return raster._replace(colors="CMYK")
    if samples in (1, 3) and photometric in (WHITE_IS_ZERO, BLACK_IS_ZERO, IS_RGB):
        return raster._replace(colors={1: "L", 3: "RGB"}[samples])
    base = {2: "L", 4: "RGB"}.get(samples, "")
    if base == "RGB" and photometric != IS_RGB:
        base = ""
    if base and extra in ((PREMULTIPLIED,), (ALPHA,)):
        return raster._replace(colors=base + ("A" if extra == (ALPHA,) else "a"))
    if base == "RGB":  # as Pillow does: a fourth sample nobody speaks of is alpha, an unspecified one is not
        return raster._replace(colors="RGBA" if not extra else "RGBX")
    return raster
