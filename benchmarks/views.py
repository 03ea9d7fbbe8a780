"""Views of JPEGs, from bytes in memory to 2 x 224 + 8 x 96 pixels, beside torchvision's and lightly's.

    python benchmarks/views.py [--threads 1 2] [--quick] [--json FILE]

Ours is what a loader process does for a micro-batch; it hands over bytes, which the device normalises. Peers
hand over normalised floats, so ours is shown with its normalisation on the CPU too. Each call makes the views
of a few photographs of the extra `demo`, scaled to the size named and saved at quality 90: 35 to 65 kB at
500 x 375, 200 to 375 kB at 1600 x 1200. The check renders what ours has drawn by torchvision's functions on
Pillow's images as well. All sides work on one thread, as loader processes do, whatever --threads says.
"""

import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lightly.transforms
import numpy as np
import torch
from PIL import Image, ImageOps
from published_views import MEAN, STD, as_published, dino_transform, on_one_thread
from side_by_side import Case, main
from torch import Tensor
from torchvision.transforms import functional as tv
from torchvision.transforms import v2

from nestling.ssl.config import Config
from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.decoding.raster import Reduction
from nestling.ssl.data.loader import TrainLoader
from nestling.ssl.data.sources.base import ImageSource
from nestling.ssl.data.sources.photo_tiles import photograph
from nestling.ssl.views.plan import draw
from nestling.ssl.views.render import normalize, render

PHOTOGRAPHS = ("astronaut", "chelsea", "coffee", "china")
SIZES = {(500, 375): 4.5, (1600, 1200): 6.0}  # width and height: how much faster, at least
NUM_LOCAL = 8


class InMemory(ImageSource):
    """Files that are read already."""

    name = "photographs"

    def __init__(self, contents: list[bytes]) -> None:
        self.contents = contents

    def __len__(self) -> int:
        return len(self.contents)

    def path(self, index: int) -> str:
        return str(index)

    def load(self, index: int, reduction: Reduction | None = None) -> np.ndarray:
        return Decoder().content(self.contents[index], self.path(index), reduction)


def jpegs(width: int, height: int) -> list[bytes]:
    """The photographs, cut and scaled to fit."""
    contents = []
    for name in PHOTOGRAPHS:
        buffer = io.BytesIO()
        whole = Image.fromarray(photograph(name))
        ImageOps.fit(whole, (width, height), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
        contents.append(buffer.getvalue())
    return contents


def loaded(contents: list[bytes], scaled: bool = True) -> Callable[[], list[Tensor]]:
    """The loader's work for a micro-batch of all photographs, other draws at each call."""
    cfg = Config()
    cfg.data.num_workers, cfg.data.scaled_decode, cfg.train.batch_size = 0, scaled, len(contents)
    batches = iter(TrainLoader(InMemory(contents), cfg, total_steps=1_000_000, process=0, num_processes=1))
    return lambda: next(batches).views


def on_tensors(size: int, scale: tuple[float, float], blur: float, solarize: float) -> v2.Compose:
    """The same by torchvision's second transforms on tensors of bytes."""
    kernel = 9  # covers two standard deviations
    return v2.Compose(
        [
            v2.RandomResizedCrop(size, scale=scale, interpolation=v2.InterpolationMode.BICUBIC),
            v2.RandomHorizontalFlip(),
            v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.2, 0.1)], 0.8),
            v2.RandomGrayscale(0.2),
            v2.RandomApply([v2.GaussianBlur(kernel, (0.1, 2.0))], blur),
            *([v2.RandomSolarize(128, solarize)] if solarize else []),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )


def dino_on_tensors() -> Callable[[Tensor], list[Tensor]]:
    """The views of an image, one after the other."""
    large = [on_tensors(224, (0.4, 1.0), 1.0, 0.0), on_tensors(224, (0.4, 1.0), 0.1, 0.2)]
    small = on_tensors(96, (0.05, 0.4), 0.5, 0.0)
    return lambda image: [make(image) for make in (*large, *[small] * NUM_LOCAL)]


def transformed(
    contents: list[bytes], views: Callable[[Any], list[Tensor]], tensors: bool = False
) -> Callable[[], list[list[Tensor]]]:
    """Decoded by Pillow, as torchvision's data sets do."""

    def call() -> list[list[Tensor]]:
        images = [Image.open(io.BytesIO(content)).convert("RGB") for content in contents]
        return [views(tv.pil_to_tensor(image) if tensors else image) for image in images]

    return call


def compared(contents: list[bytes], peer: Callable[[], list[list[Tensor]]]) -> None:
    """Shapes are the peer's; views are those of Pillow within 2 levels on average, 4 where decoded smaller.

    Raises:
        ValueError: they are not.
    """
    shapes = [tuple(view.shape) for view in peer()[0]]
    wanted = [(3, 224, 224)] * 2 + [(3, 96, 96)] * NUM_LOCAL
    if shapes != wanted:
        raise ValueError(f"the peer's views have the shapes {shapes}, not {wanted}")
    cfg = Config().views
    for number, content in enumerate(contents):
        image, decoded = Image.open(io.BytesIO(content)).convert("RGB"), Decoder().content(content, "")
        views = draw(np.random.default_rng(number), image.height, image.width, cfg, 224, 96)
        far = [np.abs(render(view, decoded).astype(int) - as_published(view, image)).mean() for view in views]
        if np.mean(far) > 2:
            raise ValueError(
                f"views differ from Pillow's by {np.mean(far):.1f} levels on average, at most 2 asked"
            )
    sides = [loaded(contents, scaled)() for scaled in (True, False)]
    for small, large in zip(*sides, strict=True):
        far = (small.float() - large.float()).abs().mean()
        if far > 4:
            raise ValueError(
                f"a smaller decoding changes views by {far:.1f} levels on average, at most 4 asked"
            )


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Per size of the images: each peer, and with normalisation."""
    for (width, height), at_least in SIZES.items():
        contents = jpegs(width, height)[: 1 if quick else None]
        dino, make = transformed(contents, dino_transform(num_local=NUM_LOCAL)), loaded(contents)
        light = transformed(contents, lightly.transforms.DINOTransform(n_local_views=NUM_LOCAL))
        tensors = transformed(contents, dino_on_tensors(), tensors=True)
        rounds = 2 if quick else 9 if width < 1000 else 5

        def normalised(make: Callable[[], list[Tensor]] = make) -> list[Tensor]:
            return [normalize(views, MEAN, STD) for views in make()]

        sides = [
            ("bytes", "torchvision v1 as DINO composes", make, dino, at_least),
            ("normalised floats", "torchvision v1 as DINO composes", normalised, dino, at_least),
            ("bytes", "lightly DINOTransform", make, light, at_least),
            ("bytes", "torchvision v2 on tensors", make, tensors, None),
        ]
        for what, peer, mine, other, asked in sides:
            name = f"views of {width} x {height}, {what}"
            yield Case(
                name,
                peer,
                on_one_thread(mine),
                on_one_thread(other),
                partial(compared, contents, other),
                asked,
                rounds=rounds,
            )


if __name__ == "__main__":
    main(cases, __doc__)
