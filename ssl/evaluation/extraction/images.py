"""The images whose features are taken: opened whole, labelled by name, told from other data sets."""

import hashlib
import json

from nestling.ssl.config import Config
from nestling.ssl.data.sources.base import ImageSource
from nestling.ssl.data.sources.opening import opened_together
from nestling.ssl.errors import UserError


def opened(config: Config, split: str) -> ImageSource:
    """All images of `data.train`, or of `data.val`; none is held out.

    Raises:
        UserError: there are none.
    """
    data = config.data
    data.holdout = 0
    if split == "train":
        data.val = None
    train, val = opened_together(config)
    if split == "train":
        return train
    if val is None:
        raise UserError("split=val, but data.val is null; name images, or leave split=train")
    return val


def label_of(source: ImageSource, image: int) -> str | None:
    """The name of an image's class, where there is one."""
    if source.labels is None or source.class_names is None:
        return None
    return source.class_names[int(source.labels[image])]


def dataset_sha256(source: ImageSource) -> str:
    """Which images in which order, by their paths and labels: what is in the files isn't read."""
    digest = hashlib.sha256()
    for image in range(len(source)):
        digest.update(json.dumps([source.path(image), label_of(source, image)]).encode())
    return digest.hexdigest()
