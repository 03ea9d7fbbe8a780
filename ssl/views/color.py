"""Colour operations on planes of floats in 0 … 255, in place where they can be.

They follow the definitions of Pillow and torchvision, but round once at the end of a view where
those truncate after every operation. Shapes: P is planes (C, H, W) float32.

Three channels are red, green and blue. For others, where no published definition is:

| operation  | C = 1              | other C                                 |
| ---------- | ------------------ | --------------------------------------- |
| brightness | one factor         | the same factor for all channels        |
| contrast   | about its own mean | each channel about its own mean         |
| saturation | nothing            | away from the mean over channels        |
| hue        | nothing            | nothing                                 |
| grayscale  | nothing            | every channel is the mean over channels |
"""

import numpy as np

from nestling.ssl.views.plan import Jitter

LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # ITU-R 601, as Pillow's mode L


def jitter(planes: np.ndarray, drawn: Jitter) -> np.ndarray:
    """Brightness, contrast, saturation and hue in the order drawn; may overwrite its input.

    Shape:
        planes: P -> P
    """
    for operation in drawn.order:
        if operation == 0:
            planes = adjust_brightness(planes, drawn.brightness)
        elif operation == 1:
            planes = adjust_contrast(planes, drawn.contrast)
        elif operation == 2:
            planes = adjust_saturation(planes, drawn.saturation)
        else:
            planes = shift_hue(planes, drawn.hue)
    return planes


def to_gray(planes: np.ndarray) -> np.ndarray:
    """Luma of three channels, else the mean over channels, (H, W)."""
    if len(planes) != 3:
        return planes.mean(axis=0)
    gray = planes[0] * LUMA[0]
    gray += planes[1] * LUMA[1]
    gray += planes[2] * LUMA[2]
    return gray


def adjust_brightness(planes: np.ndarray, factor: float) -> np.ndarray:
    """x <- factor x."""
    planes *= np.float32(factor)
    if factor > 1:
        np.minimum(planes, 255, out=planes)
    return planes


def adjust_contrast(planes: np.ndarray, factor: float) -> np.ndarray:
    """x <- factor x + (1 - factor) m, where m is the mean luma of the view, or each channel's own mean."""
    if len(planes) == 3:
        mean = planes.sum(axis=(1, 2)) @ LUMA / (planes.size / 3)
        shift = np.float32((1 - factor) * mean)
    else:
        shift = np.float32(1 - factor) * planes.mean(axis=(1, 2), keepdims=True)
    planes *= np.float32(factor)
    planes += shift
    return clip(planes) if factor > 1 else planes


def adjust_saturation(planes: np.ndarray, factor: float) -> np.ndarray:
    """x <- factor x + (1 - factor) gray, see `to_gray`; one channel has no saturation."""
    if len(planes) == 1:
        return planes
    gray = to_gray(planes)
    gray *= np.float32(1 - factor)
    planes *= np.float32(factor)
    planes += gray
    return clip(planes) if factor > 1 else planes


def shift_hue(planes: np.ndarray, turns: float) -> np.ndarray:
    """Turn the hue of HSV, without going through HSV.

    Along the hue circle a channel X is a trapezoid between m = min(R, G, B) and M = max(R, G, B):
    its ramps have slope C = M - m per sextant. At the current hue the unclipped ramp stands at
    2 X + M - (R + G + B), so a shift by s sextants, |s| <= 1, is

        X <- m + clip(2 X + M - (R + G + B) ± s C, 0, C),

    with + where X rises with the hue, which is where the channel before it exceeds the one after
    it. Whole sextants are permutations: two move each channel to the next, three complement.
    Other than three channels have no hue.
    """
    if len(planes) != 3:
        return planes
    sextants = 6 * turns
    whole = int(sextants)  # the formula holds up to a whole one
    if whole:
        planes = _turn_whole(planes, whole)
    shift = sextants - whole
    if shift == 0:
        return planes
    red, green, blue = planes
    top = np.maximum(np.maximum(red, green), blue)
    bottom = np.minimum(np.minimum(red, green), blue)
    chroma = top - bottom
    slope = chroma * np.float32(shift)
    ramp = np.empty_like(planes)
    np.subtract(blue, green, out=ramp[0])
    np.subtract(red, blue, out=ramp[1])
    np.subtract(green, red, out=ramp[2])
    np.copysign(slope, ramp, out=ramp)
    if shift < 0:
        np.negative(ramp, out=ramp)
    top -= red
    top -= green
    top -= blue
    ramp += top
    planes *= 2
    planes += ramp
    np.maximum(planes, 0, out=planes)
    np.minimum(planes, chroma, out=planes)
    planes += bottom
    return planes


def solarize(pixels: np.ndarray, threshold: int) -> np.ndarray:
    """Invert, in place, the uint8 pixels of at least `threshold`."""
    pixels ^= np.negative((pixels >= threshold).view(np.uint8))  # 255 - x is x with all bits flipped
    return pixels


def _turn_whole(planes: np.ndarray, sextants: int) -> np.ndarray:
    if sextants % 2:
        planes = planes.max(axis=0) + planes.min(axis=0) - planes
        sextants -= 3
    return np.roll(planes, sextants // 2, axis=0)


def clip(planes: np.ndarray) -> np.ndarray:
    """Into 0 … 255, in place."""
    np.maximum(planes, 0, out=planes)
    return np.minimum(planes, 255, out=planes)
