"""Colours of whole batches on the training device; loader processes then only crop, resize and flip.

The operations are those of `color.py` and `blur.py`, for many views at once. What each view drew is turned
into steps by the loader: an operation, the views it is for, and one number per view. So the sizes of all
tensors are known on the host, which never waits for a GPU here. Nothing is rounded: a view is within half a
gray level of what `render` makes of the same resized pixels.

Shapes used below: N views of one size, n of them, C channels, S the side of a view.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nestling.ssl.config import Views
from nestling.ssl.distributed import computes_on_cpu
from nestling.ssl.views.blur import PASSES
from nestling.ssl.views.plan import NUM_GLOBAL, View

JITTERS = ("brightness", "contrast", "saturation", "hue")  # as numbered in `Jitter.order`
ORDER = (*JITTERS * len(JITTERS), "grayscale", "blur", "solarize")
OF_MANY_CHANNELS = ("saturation", "hue", "grayscale")  # nothing to a single one
LUMA = (0.299, 0.587, 0.114)  # ITU-R 601


class Colors(NamedTuple):
    """What is to be done to N views: the steps one after the other, each a name and for how many views.

    Shape:
        views, numbers: (T,) int64 and float32, T the sum of all those; which views, and how much
    """

    steps: tuple[tuple[str, int], ...]
    views: Tensor
    numbers: Tensor

    def pin_memory(self) -> "Colors":
        """Called where batches go to a GPU."""
        return Colors(self.steps, self.views.pin_memory(), self.numbers.pin_memory())

    def to(self, device: torch.device) -> "Colors":
        """Without waiting, from pinned memory."""
        views, numbers = (tensor.to(device, non_blocking=True) for tensor in (self.views, self.numbers))
        return Colors(self.steps, views, numbers)


def colors_on_device(views: Views) -> bool:
    """Whether `views.color_on` means the device of this process."""
    return views.color_on == "device" or (views.color_on == "auto" and not computes_on_cpu())


def without_colors(view: View) -> View:
    """What is left to a loader process."""
    return View(view.box, view.size, view.flip, jitter=None, grayscale=False, blur=None, solarize=None)


def colors_by_size(drawn: Sequence[Sequence[View]]) -> list[Colors]:
    """Of all views of some images, grouped and ordered as in a `Batch`."""
    groups = (range(NUM_GLOBAL), range(NUM_GLOBAL, len(drawn[0])))
    return [colors_of([views[number] for number in group for views in drawn]) for group in groups if group]


def colors_of(views: Sequence[View]) -> Colors:
    """The colours that were drawn for views of one size, in the order of their batch."""
    chosen: list[list[tuple[int, float]]] = [[] for _ in ORDER]
    for place, view in enumerate(views):
        if view.jitter is not None:
            drawn = view.jitter
            numbers = (drawn.brightness, drawn.contrast, drawn.saturation, drawn.hue)
            for turn, operation in enumerate(drawn.order):
                chosen[turn * len(JITTERS) + operation].append((place, numbers[operation]))
        for step, number in ((-3, view.grayscale or None), (-2, view.blur), (-1, view.solarize)):
            if number is not None:
                chosen[step].append((place, number))
    steps = tuple((name, len(some)) for name, some in zip(ORDER, chosen, strict=True) if some)
    flat = [pair for some in chosen for pair in some]
    return Colors(
        steps,
        torch.tensor([place for place, _ in flat], dtype=torch.int64),
        torch.tensor([number for _, number in flat], dtype=torch.float32),
    )


@torch.no_grad()
def colored(images: Tensor, colors: Colors) -> Tensor:
    """Views that were resized only, with their colours; call it outside of autocast.

    Shape:
        images: (N, C, S, S) uint8 -> (N, C, S, S) float32 in 0 … 255, on the same device
    """
    planes = images.to(torch.float32)
    sizes = [size for _, size in colors.steps]
    parts = zip(colors.steps, colors.views.split(sizes), colors.numbers.split(sizes), strict=True)
    for (name, _), views, numbers in parts:
        if images.shape[1] > 1 or name not in OF_MANY_CHANNELS:
            some = OPERATIONS[name](planes.index_select(0, views), numbers[:, None, None, None])
            planes.index_copy_(0, views, some)
    return planes


def adjust_brightness(planes: Tensor, factor: Tensor) -> Tensor:
    """x <- factor x. Shape, as of all operations: (n, C, S, S), (n, 1, 1, 1) -> (n, C, S, S)."""
    return planes.mul_(factor).clamp_(max=255)


def adjust_contrast(planes: Tensor, factor: Tensor) -> Tensor:
    """x <- factor x + (1 - factor) m, m being the mean luma of a view, or each channel's own mean."""
    means = planes.mean((2, 3), keepdim=True)
    if planes.shape[1] == 3:
        means = _gray(means)
    return planes.mul_(factor).add_(means * (1 - factor)).clamp_(0, 255)


def adjust_saturation(planes: Tensor, factor: Tensor) -> Tensor:
    """x <- factor x + (1 - factor) gray."""
    gray = _gray(planes).mul_(1 - factor)
    return planes.mul_(factor).add_(gray).clamp_(0, 255)


def shift_hue(planes: Tensor, turns: Tensor) -> Tensor:
    """Turn the hue of HSV.

    At h sextants on the circle, the channel that peaks at p is m + C clip(|(h - p) mod 6 - 3| - 1, 0, 1),
    where m is the least of the three and C what the largest has above it; red, green and blue peak at 0,
    2 and 4.
    """
    if planes.shape[1] != 3:
        return planes
    red, green, blue = planes.split(1, dim=1)
    top, bottom = planes.amax(1, keepdim=True), planes.amin(1, keepdim=True)
    chroma = top - bottom
    below_red = torch.where(top == green, blue - red + 2 * chroma, red - green + 4 * chroma)
    hue = torch.where(top == red, green - blue, below_red) / chroma.clamp(min=1e-6) + 6 * turns
    peaks = torch.arange(0, 6, 2, device=planes.device)[:, None, None]
    levels = (hue - peaks).remainder_(6).sub_(3).abs_().sub_(1).clamp_(0, 1)
    return levels.mul_(chroma).add_(bottom)


def to_gray(planes: Tensor, _: Tensor) -> Tensor:
    """Every channel the luma of three, else the mean over channels."""
    return _gray(planes).expand_as(planes)


def gaussian_blur(planes: Tensor, sigma: Tensor) -> Tensor:
    """Along height and width, a product with the matrix of `PASSES` passes of a box, see `blur.py`."""
    one = _box_matrix(planes.shape[-1], sigma[:, 0])
    matrix = one
    for _ in range(PASSES - 1):
        matrix = matrix @ one
    for _ in range(2):  # each time along the width, of planes turned in between
        planes = (planes.flatten(1, 2) @ matrix.mT).unflatten(1, planes.shape[1:3]).mT
    return planes


def _box_matrix(side: int, sigma: Tensor) -> Tensor:
    """One pass of the extended box: weights 1 up to the distance l, a at l + 1.

    The outermost pixel also stands for all that lies beyond it.

    Shape:
        sigma: (n, 1, 1) -> (n, side, side)
    """
    variance = sigma.square() / PASSES
    reach = ((12 * variance + 1).sqrt() - 1).div(2).floor()
    edge = (2 * reach + 1) * (reach * (reach + 1) - 3 * variance) / (6 * (variance - (reach + 1).square()))
    here = torch.arange(side, device=sigma.device, dtype=torch.float32)
    distance = (here - here[:, None]).abs()
    matrix = (distance <= reach) + edge * (distance == reach + 1)
    beyond = (reach - here).clamp_(min=0) + edge * (here <= reach)  # of a pixel so far from the border
    matrix[..., 0] += beyond[:, 0]
    matrix[..., -1] += beyond[:, 0].flip(-1)
    return matrix.div_(2 * (reach + edge) + 1)


def solarize(planes: Tensor, threshold: Tensor) -> Tensor:
    """Invert what would round to at least the threshold."""
    return torch.where(planes >= threshold - 0.5, 255 - planes, planes)


def _gray(planes: Tensor) -> Tensor:
    """A new tensor, (n, C, h, w) -> (n, 1, h, w)."""
    if planes.shape[1] != 3:
        return planes.mean(1, keepdim=True)
    red, green, blue = planes.split(1, dim=1)
    return (red * LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2])


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "brightness": adjust_brightness,
    "contrast": adjust_contrast,
    "saturation": adjust_saturation,
    "hue": shift_hue,
    "grayscale": to_gray,
    "blur": gaussian_blur,
    "solarize": solarize,
}
