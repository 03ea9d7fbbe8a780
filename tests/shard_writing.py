"""Tar shards for tests: images whose pixels follow from their numbers."""

import io
import tarfile

import numpy as np
from PIL import Image


def pixels_of(number, size=(6, 9)):
    return np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)


def encoded(pixels, kind="png"):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def write_tar(path, members):
    """A shard of (name, content) pairs; returns its path as text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return str(path)


def write_images(path, first, count):
    return write_tar(
        path, [(f"{number:04d}.png", encoded(pixels_of(number))) for number in range(first, first + count)]
    )
