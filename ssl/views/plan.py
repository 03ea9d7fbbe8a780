"""What is drawn for the views of one image: pure, and independent of how they are rendered.

Multi-crop (Caron et al., 2020) with the augmentation of DINO (Caron et al., 2021, section 4).
Each view consumes a fixed row of uniform numbers, so no view depends on what another one drew.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from nestling.ssl.config import Views
from nestling.ssl.randomness import Stream, generator

NUM_GLOBAL = 2
REDUCTIONS = (8, 4, 2)
TRIES = 10  # random boxes before a central one is taken
_CROP = 4 * TRIES  # uniform numbers for the box; those for the colours follow
_ROW = _CROP + 11
_ORDERS = tuple(itertools.permutations(range(4)))

Box = tuple[int, int, int, int]  # top, left, height, width


@dataclass(frozen=True)
class Jitter:
    """Colour jitter; `order` lists 0 brightness, 1 contrast, 2 saturation, 3 hue."""

    order: tuple[int, ...]
    brightness: float
    contrast: float
    saturation: float
    hue: float  # in turns of the colour circle


@dataclass(frozen=True)
class View:
    """One view: a box of the image resized to `size`, then flip, jitter, gray, blur, solarize."""

    box: Box
    size: int
    flip: bool
    jitter: Jitter | None
    grayscale: bool
    blur: float | None  # standard deviation in pixels of the view
    solarize: int | None  # threshold


def draw(
    random: np.random.Generator, height: int, width: int, cfg: Views, global_size: int, local_size: int
) -> list[View]:
    """The two global views, then the local ones, of an image of this height and width.

    The draws don't depend on the sizes of the views, nor do the global ones on the local ones.
    """
    rows = random.random((NUM_GLOBAL + cfg.num_local, _ROW)).tolist()
    views = []
    for number, row in enumerate(rows):
        if number < NUM_GLOBAL:
            size, scale = global_size, cfg.global_scale
            blur, solarize = cfg.global_blur[number], cfg.global_solarize[number]
        else:
            size, scale = local_size, cfg.local_scale
            blur, solarize = cfg.local_blur, 0.0
        box = draw_box(row, height, width, scale, cfg.ratio)
        views.append(_view(row[_CROP:], box, size, cfg, blur, solarize))
    return views


class Planned:
    """The views of an image by its height and width, which its header tells before it is decoded.

    As a function it says by how much the image may be decoded smaller: as long as each view still shrinks
    its box, so that none is made of fewer pixels than it has.
    """

    def __init__(
        self, random: Callable[[], np.random.Generator], cfg: Views, global_size: int, local_size: int
    ) -> None:
        self._random, self._cfg, self._sizes = random, cfg, (global_size, local_size)
        self._views: dict[tuple[int, int], list[View]] = {}

    def __call__(self, height: int, width: int) -> int:
        return reduction(self.of(height, width))

    def of(self, height: int, width: int, shape: tuple[int, ...] | None = None) -> list[View]:
        """The views of an image of this height and width, in pixels of the `shape` that it was decoded to."""
        size = height, width
        if size not in self._views:
            self._views[size] = draw(self._random(), height, width, self._cfg, *self._sizes)
        views = self._views[size]
        if shape is None or shape[:2] == size:
            return views
        factor = reduction(views)
        return [replace(view, box=reduced(view.box, factor)) for view in views]


def reduction(views: list[View]) -> int:
    """The largest of the factors that JPEGs can be decoded smaller by under which each view still shrinks."""
    least = min(min(view.box[2:]) / (view.size + 1) for view in views)  # a pixel more, as boxes are rounded
    return next((factor for factor in REDUCTIONS if least >= factor), 1)


def reduced(box: Box, factor: int) -> Box:
    """The box in an image that is smaller by a factor, to the nearest pixel."""
    top, left, height, width = box
    new_top, new_left = round(top / factor), round(left / factor)
    return (
        new_top,
        new_left,
        round((top + height) / factor) - new_top,
        round((left + width) / factor) - new_left,
    )


def sizes_at(cfg: Views, seed: int, step: int) -> tuple[int, int]:
    """The sides of the global and of the local views of a step, alike on all processes."""
    first, second = generator(seed, Stream.SIZES, step).random(2).tolist()
    global_sizes, local_sizes = cfg.global_size, cfg.local_size
    return global_sizes[int(first * len(global_sizes))], local_sizes[int(second * len(local_sizes))]


def draw_box(uniform: list[float], height: int, width: int, scale: list[float], ratio: list[float]) -> Box:
    """A box whose area is uniform and whose ratio is log-uniform; a central one where none fits."""
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for start in range(0, _CROP, 4):
        area, shape, down, right = uniform[start : start + 4]
        area = height * width * (scale[0] + (scale[1] - scale[0]) * area)
        shape = math.exp(low + (high - low) * shape)
        w, h = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < w <= width and 0 < h <= height:
            return int(down * (height - h + 1)), int(right * (width - w + 1)), h, w
    return central_box(height, width, ratio)


def central_box(height: int, width: int, ratio: list[float]) -> Box:
    """The largest central box whose width / height lies within `ratio`."""
    h, w = height, width
    if width / height < ratio[0]:
        h = max(1, min(height, round(width / ratio[0])))
    elif width / height > ratio[1]:
        w = max(1, min(width, round(height * ratio[1])))
    return (height - h) // 2, (width - w) // 2, h, w


def _view(uniform: list[float], box: Box, size: int, cfg: Views, blur: float, solarize: float) -> View:
    sigma = cfg.blur_sigma
    return View(
        box=box,
        size=size,
        flip=uniform[0] < cfg.flip,
        jitter=_jitter(uniform[1:6], cfg) if uniform[6] < cfg.jitter else None,
        grayscale=uniform[7] < cfg.grayscale,
        blur=sigma[0] + (sigma[1] - sigma[0]) * uniform[9] if uniform[8] < blur else None,
        solarize=cfg.solarize_threshold if uniform[10] < solarize else None,
    )


def _jitter(uniform: list[float], cfg: Views) -> Jitter:
    centered = [2 * u - 1 for u in uniform[:4]]
    return Jitter(
        order=_ORDERS[int(uniform[4] * len(_ORDERS))],
        brightness=1 + cfg.brightness * centered[0],
        contrast=1 + cfg.contrast * centered[1],
        saturation=1 + cfg.saturation * centered[2],
        hue=cfg.hue * centered[3],
    )
