"""Class folders of small PNGs whose textures a network can tell apart; for tests and smoke runs.

python tests/image_folder.py FOLDER [--classes N] [--per-class N] [--size PIXELS]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image


def texture(kind: int, size: int, generator: np.random.Generator) -> np.ndarray:
    """Stripes whose direction, width and colour tell the kind; phase, contrast and noise are the image's own.

    Shape:
        (size, size, 3), uint8
    """
    own = np.random.default_rng(kind)
    angle, period = np.pi * kind * 0.381966, 4 + 3 * (kind % 4)
    colour = own.uniform(0.3, 1, size=3)
    rows, columns = np.mgrid[:size, :size]
    phase = 2 * np.pi * ((rows * np.sin(angle) + columns * np.cos(angle)) / period + generator.uniform())
    stripes = 0.5 + 0.5 * generator.uniform(0.6, 1) * np.sin(phase)
    noise = generator.normal(scale=0.05, size=(size, size, 3))
    return (255 * np.clip(stripes[..., None] * colour + noise, 0, 1)).astype(np.uint8)


def write_image_folder(
    root: Path, classes: Sequence[str] | int = 3, per_class: int = 8, size: int = 32, seed: int = 0
) -> Path:
    """Write root/CLASS/0000.png, …; the same arguments give the same bytes. Returns root."""
    names = [f"class_{kind}" for kind in range(classes)] if isinstance(classes, int) else classes
    for kind, name in enumerate(names):
        (root / name).mkdir(parents=True, exist_ok=True)
        for index in range(per_class):
            pixels = texture(kind, size, np.random.default_rng((seed, kind, index)))
            Image.fromarray(pixels).save(root / name / f"{index:04d}.png")
    return root


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write class folders of small textures.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--classes", type=int, default=3)
    parser.add_argument("--per-class", type=int, default=8)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write_image_folder(options.folder, options.classes, options.per_class, options.size, options.seed)
