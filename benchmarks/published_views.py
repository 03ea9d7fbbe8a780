"""DINO's views of an image as its paper composes them, out of torchvision's transforms on Pillow images.

Caron et al., 2021, section 4 and appendix: two global views and local ones, each with random resized crop,
flip, colour jitter, grayscale, Gaussian blur (BYOL's augmentation), the second global one also solarized.
"""

import random
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
import torchvision.transforms.functional as tv
from PIL import Image, ImageFilter
from torch import Tensor
from torchvision import transforms
from torchvision.transforms import InterpolationMode

from nestling.ssl.views.plan import View

Result = TypeVar("Result")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def dino_transform(
    global_size: int = 224, local_size: int = 96, num_local: int = 8
) -> Callable[[Image.Image], list[Tensor]]:
    """An image -> its normalised views, the two global ones first."""
    first = _view(global_size, (0.4, 1.0), blur=1.0, solarize=0.0)
    second = _view(global_size, (0.4, 1.0), blur=0.1, solarize=0.2)
    local = _view(local_size, (0.05, 0.4), blur=0.5, solarize=0.0)
    return lambda image: [view(image) for view in (first, second, *[local] * num_local)]


def _view(size: int, scale: tuple[float, float], blur: float, solarize: float) -> transforms.Compose:
    jitter = transforms.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1)
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(size, scale=scale, interpolation=InterpolationMode.BICUBIC),
            transforms.RandomHorizontalFlip(0.5),
            transforms.RandomApply([jitter], p=0.8),
            transforms.RandomGrayscale(0.2),
            transforms.RandomApply([transforms.Lambda(_blurred)], p=blur),
            *([transforms.RandomSolarize(128, p=solarize)] if solarize else []),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )


def _blurred(image: Image.Image) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2.0)))


def as_published(view: View, image: Image.Image) -> np.ndarray:
    """torchvision's operations on what a view drew, one after the other; (3, size, size) uint8."""
    image = tv.resized_crop(image, *view.box, [view.size] * 2, tv.InterpolationMode.BICUBIC)
    image = tv.hflip(image) if view.flip else image
    if view.jitter is not None:
        drawn = view.jitter
        functions = (tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation, tv.adjust_hue)
        factors = (drawn.brightness, drawn.contrast, drawn.saturation, drawn.hue)
        for operation in drawn.order:
            image = functions[operation](image, factors[operation])
    if view.grayscale:
        image = tv.rgb_to_grayscale(image, 3)
    if view.blur is not None:
        image = image.filter(ImageFilter.GaussianBlur(view.blur))
    if view.solarize is not None:
        image = tv.solarize(image, view.solarize)
    return np.asarray(image).transpose(2, 0, 1)


def on_one_thread(call: Callable[[], Result]) -> Callable[[], Result]:
    """As in a loader process."""

    def wrapped() -> Result:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return call()
        finally:
            torch.set_num_threads(threads)

    return wrapped
