"""How the views that were drawn are rendered: fast, and close to the published pipeline.

One call of the compiled kernel (native/) makes a view. Where the package was installed without a
compiler, NumPy and PyTorch do the same within rounding: small boxes are resized by two matrix products,
as calls cost more than pixels there; others by torch's 8-bit antialiased bicubic. All ways lie within two
gray levels of Pillow's resize. Colours and blur run on planes of floats that are rounded once, and what
was not drawn costs nothing.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nestling.backbones.kernels import check_absent
from nestling.ssl.views.blur import gaussian_blur
from nestling.ssl.views.color import clip, jitter, solarize, to_gray
from nestling.ssl.views.plan import Jitter, View

try:
    import nestling.ssl.views.kernel as kernel
except ImportError as error:
    check_absent(error, "nestling.ssl.views.kernel")
    kernel = None  # type: ignore[assignment]

SMALL = 64  # up to this side of box and view, matrices resize
UNCHANGED = Jitter((), 1, 1, 1, 0)
NEVER = 256  # a threshold above all levels


def render(view: View, image: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """One view of an image, written to `out`, contiguous, where that is given.

    Shape:
        image: (H, W, C) uint8
        returns: (C, size, size) uint8
    """
    shape = (image.shape[2], view.size, view.size)
    if out is None:
        out = np.empty(shape, np.uint8)
    assert image.dtype == out.dtype == np.uint8, (image.dtype, out.dtype)
    assert out.shape == shape, (out.shape, shape)
    assert out.flags.c_contiguous, out.strides
    if kernel is None:
        out[...] = _without_kernel(view, image)
        return out
    drawn = view.jitter or UNCHANGED
    kernel.render(
        np.ascontiguousarray(image),
        image.shape,
        view.box,
        view.size,
        view.flip,
        bytes(drawn.order),
        (drawn.brightness, drawn.contrast, drawn.saturation, drawn.hue),
        view.grayscale,
        view.blur or 0.0,
        NEVER if view.solarize is None else view.solarize,
        out,
    )
    return out


def _without_kernel(view: View, image: np.ndarray) -> np.ndarray:
    top, left, height, width = view.box
    crop = image[top : top + height, left : left + width]
    if max(height, width, view.size) <= SMALL:
        planes = resize_small(crop, view.size, view.flip)
    else:
        resized = resize_large(crop, view.size, view.flip)
        if view.jitter is None and not view.grayscale and view.blur is None:
            return _solarized(resized, view, len(resized))
        planes = resized.astype(np.float32)
    return _solarized(_rounded(_recolored(planes, view)), view, len(planes))


def resize_small(crop: np.ndarray, size: int, flip: bool) -> np.ndarray:
    """Bicubic, antialiased: rows and columns each times a matrix of weights.

    Shape:
        crop: (h, w, C) uint8
        returns: (C, size, size) float32
    """
    planes = crop.transpose(2, 0, 1).astype(np.float32, order="C")
    height, width = crop.shape[:2]
    return clip(_resize_matrix(height, size, False) @ planes @ _resize_matrix(width, size, flip).T)


def resize_large(crop: np.ndarray, size: int | tuple[int, int], flip: bool) -> np.ndarray:
    """The same, (h, w, C) uint8 -> (C, size, size) uint8; a size may be (height, width)."""
    images = torch.from_numpy(crop).permute(2, 0, 1)[None]
    resized = F.interpolate(images, size=size, mode="bicubic", antialias=True)[0]
    return (resized.flip(-1) if flip else resized).contiguous().numpy()


@lru_cache(maxsize=2048)
def _resize_matrix(before: int, after: int, flip: bool) -> np.ndarray:
    """The weights of `before` pixels in each of `after`, by resizing the identity."""
    identity = torch.eye(before)[None, None]
    weights = F.interpolate(identity, size=(after, before), mode="bicubic", antialias=True)[0, 0]
    return (weights.flip(0) if flip else weights).contiguous().numpy()


def _recolored(planes: np.ndarray, view: View) -> np.ndarray:
    """Jitter, gray and blur; one plane is enough for a gray view."""
    if view.jitter is not None:
        planes = jitter(planes, view.jitter)
    if view.grayscale:
        planes = to_gray(planes)[None]
    if view.blur is not None:
        planes = gaussian_blur(planes, view.blur)
    return planes


def _rounded(planes: np.ndarray) -> np.ndarray:
    planes += np.float32(0.5)
    return planes.astype(np.uint8)


def _solarized(pixels: np.ndarray, view: View, channels: int) -> np.ndarray:
    if len(pixels) != channels:  # one plane, of a gray view
        pixels = np.repeat(pixels, channels, axis=0)
    return pixels if view.solarize is None else solarize(pixels, view.solarize)


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(x / 255 - mean) / std per channel, in float32, on the device of the images.

    Shape:
        images: (B, C, H, W) uint8 -> (B, C, H, W) float32; floats in 0 … 255 are changed in place
    """
    scale, shift = _scale_and_shift(tuple(mean), tuple(std), images.device)
    return images.to(torch.float32).mul_(scale).add_(shift)


@lru_cache(maxsize=64)  # so that no step waits until they are on a GPU
def _scale_and_shift(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Shape: (C, 1, 1) each."""
    with torch.inference_mode(False):  # else no gradient could ever pass those first made in it
        scale = 1 / (255 * torch.tensor(std, dtype=torch.float32, device=device))
        shift = -255 * torch.tensor(mean, dtype=torch.float32, device=device) * scale
        return scale[:, None, None], shift[:, None, None]
