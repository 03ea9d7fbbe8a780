"""What a loader process spends per image where the device colours, and what the device spends on that.

    python benchmarks/worker_share.py [--threads 1 2] [--quick] [--json FILE] [--device cuda]

A loader process reads JPEGs of 500 x 375 pixels that the system has in memory, decodes them, and crops,
resizes and flips 2 x 224 + 8 x 96 views; what they drew of colours goes along as numbers. The peer's whole
job is that of torchvision's transforms as DINO composes them, up to the stacked batch. Loader processes have
one thread, so this case is alike for any `--threads`.

The second case is the work that moved: the colours of that batch on `--device`, beside the same in the loader
(which also resizes views to the size they have). On a CPU batches are no match for that, so
views.color_on=auto leaves colours to the loader there.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from loader_throughput import HEIGHT, WIDTH, write_photographs
from PIL import Image
from published_views import as_published, dino_transform, on_one_thread
from side_by_side import Case, main
from torch import Tensor

from nestling.ssl.config import Config
from nestling.ssl.data.loader import Batch, TrainLoader
from nestling.ssl.data.sources.opening import open_source
from nestling.ssl.randomness import Stream, generator
from nestling.ssl.views.on_device import colored
from nestling.ssl.views.plan import View, draw
from nestling.ssl.views.render import render

SIZES = (224, 96)
STEPS = 100_000  # more than are ever taken
CLOSE = 2.0  # gray levels on average: torchvision truncates after every operation


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """The loader's share, then the device's."""
    count, rounds = (4, 2) if quick else (16, 15)
    config = Config()
    config.train.batch_size, config.train.epochs = count, STEPS
    config.data.num_workers, config.views.color_on = 0, "device"
    with tempfile.TemporaryDirectory() as folder:
        write_photographs(Path(folder, "images"), count)
        config.data.train, config.data.cache = f"{folder}/images", f"{folder}/cache"
        paths = sorted(Path(config.data.train).iterdir())
        with TrainLoader(open_source(config.data, "train"), config, STEPS, 0, 1) as loader:
            batches = iter(loader)
            batch = next(batches)
            views = views_of(batch, config)
            yield Case(
                part=f"loader's share, {count} images",
                peer="torchvision v1, as DINO composes",
                ours=on_one_thread(lambda: next(batches)),
                theirs=on_one_thread(lambda: published_batch(paths)),
                check=lambda: check_published(batch, views, paths),
                at_least=8,
                rounds=rounds,
            )
    moved = batch.to(device)
    yield Case(
        part=f"colours of {count} images",
        peer="the same in the loader",
        ours=lambda: colored_together(moved),
        theirs=lambda: colored_alone(batch, views),
        check=lambda: check_alike(moved, batch, views),
        rounds=rounds,
    )


def views_of(batch: Batch, config: Config) -> list[View]:
    """What was drawn for a batch of the first epoch, in its order: view after view."""
    planned = [
        draw(generator(config.seed, Stream.VIEWS, 0, index), HEIGHT, WIDTH, config.views, *SIZES)
        for index in batch.indices.tolist()
    ]
    return [view for together in zip(*planned, strict=True) for view in together]


def published_batch(paths: list[Path]) -> list[Tensor]:
    """All first views, all second ones, …, as torch's data loader stacks them."""
    transform = dino_transform(*SIZES)
    images = [transform(Image.open(path).convert("RGB")) for path in paths]
    return [torch.stack(views) for views in zip(*images, strict=True)]


def colored_together(batch: Batch) -> list[Tensor]:
    assert batch.colors is not None
    return list(map(colored, batch.views, batch.colors))


def colored_alone(batch: Batch, views: list[View]) -> list[np.ndarray]:
    """One view after the other, each having its size and side already."""
    images = [image for group in batch.views for image in group.permute(0, 2, 3, 1).numpy()]
    return [
        render(replace(view, box=(0, 0, view.size, view.size), flip=False), image)
        for view, image in zip(views, images, strict=True)
    ]


def check_alike(moved: Batch, batch: Batch, views: list[View]) -> None:
    """Both within one gray level.

    Raises:
        RuntimeError: they aren't.
    """
    ours = [view.cpu().numpy() for group in colored_together(moved) for view in group]
    far = max(
        float(np.abs(mine - theirs).max())
        for mine, theirs in zip(ours, colored_alone(batch, views), strict=True)
    )
    if far > 1:
        raise RuntimeError(f"colours on the device are up to {far:.2f} gray levels from the loader's, not 1")


def check_published(batch: Batch, views: list[View], paths: list[Path]) -> None:
    """The same draws give the same views by torchvision, colours included.

    Raises:
        RuntimeError: they don't.
    """
    images = [Image.open(paths[index]).convert("RGB") for index in batch.indices.tolist()]
    ours = [view.numpy() for group in colored_together(batch) for view in group]
    far = [
        np.abs(mine - as_published(view, images[number % len(images)])).mean()
        for number, (mine, view) in enumerate(zip(ours, views, strict=True))
    ]
    if np.mean(far) > CLOSE:
        raise RuntimeError(f"views are {np.mean(far):.2f} gray levels from torchvision's, not {CLOSE:g}")


if __name__ == "__main__":
    main(cases, __doc__)
