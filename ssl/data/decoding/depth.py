"""Numbers of any type become 8 bits: scaled as a whole, so that no part of their range is clipped."""

from functools import lru_cache

import numpy as np

from nestling.ssl.data.decoding.raster import UndecodableError

Range = tuple[float, float]
UNIT, EIGHT_BITS, SIXTEEN_BITS = (0.0, 1.0), (0.0, 255.0), (0.0, 65535.0)


def to_eight_bits(pixels: np.ndarray, window: Range | None = None, largest: int | None = None) -> np.ndarray:
    """Scale to 0 … 255; images of 8 bits stay as they are.

    The range that becomes 0 … 255 is the first of these that there is:
    - `window`, beyond which values are clamped;
    - 0 … `largest`, which a file declares whose samples have fewer bits than the type that holds them;
    - the whole range of an integer type of up to 16 bits;
    - for wider integers, which rarely fill their range, 0 … 255 where all values of the image lie in it,
      as in images of 8 bits that NumPy's default type holds, else 0 … 65535 where all lie in that: a window
      makes images of such a type alike;
    - for floats 0 … 1 where all lie in it;
    - from the smallest to the largest value of the image.

    Shape:
        pixels: any, bool or real -> the same, uint8

    Raises:
        UndecodableError: values that aren't finite or no real numbers.
    """
    kind, size = pixels.dtype.kind, pixels.dtype.itemsize
    if kind == "b":
        return pixels.astype(np.uint8) * np.uint8(255)
    if kind not in "iuf":
        raise UndecodableError(f"holds {pixels.dtype}, not real numbers")
    pixels = pixels.astype(pixels.dtype.newbyteorder("="), copy=False)
    values = (0.0, float(largest)) if window is None and largest is not None else window
    if kind in "iu" and size == 1 and largest is None:
        return pixels if kind == "u" else (pixels.view(np.uint8) ^ np.uint8(128))  # -128 … 127 -> 0 … 255
    if kind in "iu" and size == 2:
        return _table(kind, values)[np.ascontiguousarray(pixels).view(np.uint16)]
    if kind == "f" and not np.isfinite(pixels).all():
        raise UndecodableError("holds values that are not finite")
    return _scaled(pixels, values or _range_of(pixels))


def _range_of(pixels: np.ndarray) -> Range:
    """Of floats and of integers wider than 16 bits."""
    low, high = float(pixels.min()), float(pixels.max())
    usual = [UNIT] if pixels.dtype.kind == "f" else [EIGHT_BITS, SIXTEEN_BITS]
    return next((values for values in usual if values[0] <= low and high <= values[1]), (low, high))


def _scaled(pixels: np.ndarray, values: Range) -> np.ndarray:
    low, high = values
    scaled = (pixels.astype(np.float64) - low) * (255 / max(high - low, 1e-12))
    return np.round(scaled, out=scaled).clip(0, 255, out=scaled).astype(np.uint8)


@lru_cache(maxsize=16)
def _table(kind: str, window: Range | None) -> np.ndarray:
    """The 8 bits of every 16-bit value, in the order of its bits."""
    values = np.arange(65536, dtype=np.uint16)
    if kind == "i":
        return _scaled(values.view(np.int16), window or (-32768.0, 32767.0))
    return _scaled(values, window or SIXTEEN_BITS)
