"""DINO's views of an image as its paper composes them, out of torchvision's transforms on Pillow images.

Caron et al., 2021, section 4 and appendix: two global views and local ones, each with random resized crop,
flip, colour jitter, grayscale, Gaussian blur (BYOL's augmentation), the second global one also solarized.
"""

import random
from collections.abc import Callable

from PIL import Image, ImageFilter
from torch import Tensor
from torchvision import transforms
from torchvision.transforms import InterpolationMode

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
