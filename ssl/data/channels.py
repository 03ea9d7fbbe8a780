"""How many channels an image has, and what they are normalised by: one answer for loader and network."""

from typing import Any

from nestling.ssl.config import Config, Data

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
GRAY_MEAN, GRAY_STD = 0.459, 0.226  # ImageNet's, weighted as luma (ITU-R 601)
BY_MODE = {"rgb": 3, "gray": 1}


def channels(data: Data) -> int:
    """The channels of every image; `data.mode: unchanged` must say them in `data.in_chans`."""
    if data.in_chans is not None:
        return data.in_chans
    assert data.mode in BY_MODE, "checked when the config is read"
    return BY_MODE[data.mode]


def normalisation(data: Data) -> tuple[list[float], list[float]]:
    """Mean and standard deviation per channel, of pixels in [0, 1]."""
    count = channels(data)
    mean = [GRAY_MEAN] if count == 1 else list(IMAGENET_MEAN)
    std = [GRAY_STD] if count == 1 else list(IMAGENET_STD)
    return data.mean or mean, data.std or std


def backbone_options(config: Config) -> dict[str, Any]:
    """The constructor options of the run's backbone, its channels being those of the images.

    Three are every network's own default, so they aren't asked of one that knows no `in_chans`.
    """
    count = channels(config.data)
    return {**config.backbone.options, **({} if count == 3 else {"in_chans": count})}
