"""From a file to upright 8-bit pixels: the one way in which any part of the package reads an image.

- `data.mode` rgb gives 3 channels and gray 1 (luma, ITU-R 601), whatever is stored; unchanged gives
  the channels as stored, palettes as their colours. Transparency is laid over `data.background`.
- Deeper images are scaled by the range of their type or by `data.window`: see `depth.py`. The range of TIFF
  files of 2 to 15 bits is that of their bits. The window is for all but images of 1 and 8 bits; formats
  other than TIFF have 8 bits where they have fewer. Pillow reduces deeper colours to 8 bits in PNG and PPM
  (both without a window), JPEG 2000 and AVIF; a window is refused for deep JPEG 2000, whose values Pillow
  changes.
- Formats are those of `pillow.py`, .npy, and TIFF as tifffile reads it.
- Too large is, by the header and before pixels are decoded: more than `data.max_pixels`; more channels than
  the mode takes, each of 8 bytes at most; a file of more bytes than the most pixels and channels of 8 bytes,
  or of more than 64 MiB whose header tells no size.
- Of animations and of several pages the first one counts; in mode unchanged, pages of one sample each
  that are as many as `data.in_chans` are the channels of one image.
- TIFF files go through tifffile wherever Pillow would lose a part of them: see `tiff.py`.

Shapes used below: H, W pixels, C channels.
"""

import io
import struct
from collections.abc import Collection
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

from nestling.ssl.config import Data
from nestling.ssl.data.channels import channels
from nestling.ssl.data.decoding import npy, pillow, tiff
from nestling.ssl.data.decoding.colors import convert, finish, no_colors
from nestling.ssl.data.decoding.quiet import quiet
from nestling.ssl.data.decoding.raster import Raster, Reduction, UndecodableError, as_stored, upright
from nestling.ssl.data.decoding.reach import LARGE, bytes_of, open_file
from nestling.ssl.data.failures import UnreadableError
from nestling.ssl.names import printable

ARRAY_COLORS = {1: "L", 3: "RGB", 4: "RGBA"}
KINDS = {  # how content begins
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG": "PNG",
    b"GIF8": "GIF",
    b"RIFF": "WebP",
    b"BM": "BMP",
    npy.MAGIC: ".npy",
    **dict.fromkeys(tiff.MAGIC, "TIFF"),
}


@dataclass(frozen=True)
class Decoder:
    """How images are read; every part of the package reads them through one of these.

    The arrays returned are (H, W, C) uint8 and may be shared: they are not to be written to.
    """

    mode: str = "rgb"
    channels: int = 3
    background: tuple[int, int, int] = (255, 255, 255)
    orientation: bool = True
    window: tuple[float, float] | None = None
    max_pixels: int = 178_956_970

    @staticmethod
    def of(data: Data) -> "Decoder":
        """As the section `data` of a config says."""
        return Decoder(
            mode=data.mode,
            channels=channels(data),
            background=(data.background[0], data.background[1], data.background[2]),
            orientation=data.orientation,
            window=None if data.window is None else (data.window[0], data.window[1]),
            max_pixels=data.max_pixels,
        )

    def file(self, path: str, reduction: Reduction | None = None) -> np.ndarray:
        """Read one file; a JPEG as much smaller as `reduction` allows.

        Raises:
            UnreadableError: the file can't be reached, decoded, or holds other channels than asked for.
        """
        try:
            content = bytes_of(path, self._look)
        except UnreadableError:
            raise
        except Exception as problem:
            raise UnreadableError(path, _in_words(problem, b"")) from problem
        return self.content(content, path, reduction)

    def content(self, content: bytes, name: str, reduction: Reduction | None = None) -> np.ndarray:
        """The same of a file's content, whose first bytes tell its format; `name` is for messages alone."""
        try:
            with quiet():
                return self._checked(self._decoded(content, reduction))
        except Exception as problem:  # decoders raise anything from OSError to struct.error
            raise UnreadableError(name, _in_words(problem, content)) from problem

    def image(self, image: Image.Image, name: str) -> np.ndarray:
        """The same of an image that Pillow has opened, as data sets hand them out."""
        try:
            with quiet():
                if image.format not in (None, "MPO", *pillow.FORMATS):
                    raise UndecodableError(f"is of the format {image.format}, which is not supported")
                self._allow(image.height, image.width)
                return self._checked(self._of_pillow(image, b""))
        except Exception as problem:
            raise UnreadableError(name, _in_words(problem, b"")) from problem

    def array(self, pixels: np.ndarray, name: str) -> np.ndarray:
        """Pixels from elsewhere: (H, W), (H, W, C), or (C, H, W) where only that fits, of any real type.

        In the modes rgb and gray, 1, 3 and 4 channels are gray, RGB and RGBA.
        """
        try:
            return self._checked(self._of_array(npy.channels_last(pixels, self._fitting())))
        except (UndecodableError, MemoryError) as problem:
            raise UnreadableError(name, _in_words(problem, b"")) from problem

    def size(self, path: str) -> tuple[int, int] | None:
        """Height and width as stored, from the header alone; None where it can't be read. Not retried."""
        try:
            with open_file(path) as file:
                return self._size(file)
        except (OSError, ValueError, UndecodableError):  # ValueError: a name that holds a zero byte
            return None

    def content_size(self, content: bytes) -> tuple[int, int] | None:
        """The same of a file's content."""
        return self._size(io.BytesIO(content))

    def _size(self, stream: BinaryIO) -> tuple[int, int] | None:
        try:
            return self._header(stream)
        except Exception:  # whatever a decoder raises; decoding then says what is wrong
            return None

    def _header(self, stream: BinaryIO) -> tuple[int, int]:
        with quiet():
            start = stream.read(len(npy.MAGIC))
            stream.seek(0)
            if start == npy.MAGIC:
                return npy.npy_size(stream, self._fitting())
            try:
                with pillow.open_image(stream) as image:
                    return image.height, image.width
            except UnidentifiedImageError:
                if not start.startswith(tiff.MAGIC):
                    raise
                stream.seek(0)
                return tiff.tiff_size(stream)

    def _look(self, file: BinaryIO, num_bytes: int) -> None:
        """Refuse a large file before it is read whole: by its length, then by its header."""
        most = max(LARGE, self.max_pixels * self._most_channels() * 8)
        if num_bytes > most:
            raise UndecodableError(
                f"has {num_bytes:,} bytes, more than the {most:,} of the largest image "
                f"that data.max_pixels={self.max_pixels} allows"
            )
        try:
            size = self._header(file)
        except Exception as problem:
            if isinstance(problem, UndecodableError) or getattr(problem, "errno", None) is not None:
                raise
            file.seek(0)
            raise UndecodableError(_in_words(problem, file.read(16))) from problem
        self._allow(*size)

    def _most_channels(self) -> int:
        return max(self.channels, 4)

    def _allow(self, height: int, width: int, channels: int = 1) -> None:
        if height * width > self.max_pixels:
            raise UndecodableError(
                f"has {width} x {height} = {height * width:,} pixels, "
                f"data.max_pixels allows {self.max_pixels:,}"
            )
        if channels > self._most_channels():
            raise self._wrong(channels) if self.mode == "unchanged" else no_colors(channels, self.mode)

    def _fitting(self) -> Collection[int]:
        return (self.channels,) if self.mode == "unchanged" else ARRAY_COLORS

    def _decoded(self, content: bytes, reduction: Reduction | None) -> np.ndarray:
        """Upright, 8 bits, of as many channels as the mode or the file says."""
        if not content:
            raise UndecodableError("is empty (0 bytes)")
        if content.startswith(npy.MAGIC):
            return self._of_array(npy.read_npy(content, self._fitting(), self._allow))
        unchanged = self.mode == "unchanged"
        bands = self.channels if unchanged else 1
        try:
            image = pillow.open_image(io.BytesIO(content))
        except UnidentifiedImageError:
            if content.startswith(tiff.MAGIC):
                return self._of_tiff(content, bands)
            raise
        with image:
            self._allow(image.height, image.width)
            if image.format == "TIFF" and tiff.is_for_tifffile(
                image, unchanged, bands, self.window is not None
            ):
                return self._of_tiff(content, bands)
            if reduction is not None:
                pillow.reduce(image, reduction, self.orientation)
            return self._of_pillow(image, content)

    def _of_pillow(self, image: Image.Image, content: bytes) -> np.ndarray:
        """The channels asked for of an image that Pillow has opened."""
        orientation, is_turned = pillow.load(image)
        raster = pillow.deep(image, content, self.window is not None, self.mode == "unchanged")
        pixels = convert(image, self.mode, self.background) if raster is None else self._of_raster(raster)
        if is_turned == self.orientation:
            return pixels
        return upright(pixels, orientation) if self.orientation else as_stored(pixels, orientation)

    def _of_tiff(self, content: bytes, bands: int) -> np.ndarray:
        raster, orientation = tiff.read_tiff(content, bands, self._allow)
        return upright(self._of_raster(raster), orientation if self.orientation else 1)

    def _of_array(self, pixels: np.ndarray) -> np.ndarray:
        """An array says nothing about its channels: by their number they are gray, RGB or RGBA."""
        colors = "" if self.mode == "unchanged" else ARRAY_COLORS.get(pixels.shape[2], "")
        return self._of_raster(Raster(pixels, colors))

    def _of_raster(self, raster: Raster) -> np.ndarray:
        return finish(raster, self.mode, self.background, self.window)

    def _checked(self, pixels: np.ndarray) -> np.ndarray:
        """With the channels expected, contiguous and in memory of its own kind."""
        count = pixels.shape[2]
        if count != self.channels:
            raise self._wrong(count)
        return np.require(pixels, np.uint8, ["C", "W"])  # torch warns of read-only memory

    def _wrong(self, count: int) -> UndecodableError:
        found = "1 channel" if count == 1 else f"{count} channels"
        return UndecodableError(f"has {found}, data.in_chans={self.channels} expects {self.channels}")


def _in_words(problem: Exception, content: bytes) -> str:
    """What is wrong with content, in a few words on one line."""
    if isinstance(problem, UndecodableError):
        return str(problem)
    if isinstance(problem, MemoryError):
        return "needs more memory than there is"
    text = printable(" ".join(str(problem).split())) or type(problem).__name__
    if isinstance(problem, EOFError) or "truncated" in text or text.startswith("EOF"):
        return "is truncated"
    kind = next((kind for start, kind in KINDS.items() if content.startswith(start)), None)
    if content[4:8] == b"ftyp":
        kind = "HEIF or AVIF"
    if kind and isinstance(problem, UnidentifiedImageError | LookupError | struct.error):
        return f"is a {kind} file that is damaged or of an unknown kind"
    if isinstance(problem, UnidentifiedImageError):
        return f"is no image (starts with {content[:8]!r})"
    return f"can't be decoded ({text[:100]})"
