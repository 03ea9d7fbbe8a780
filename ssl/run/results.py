"""What a finished run shows: a table of what was learned, and a picture."""

import logging
from pathlib import Path

import numpy as np
from accelerate import Accelerator
from rich.table import Table

from nestling.backbones import Backbone
from nestling.ssl.config import Config
from nestling.ssl.data.channels import normalisation
from nestling.ssl.data.failures import UnreadableError
from nestling.ssl.data.sources import photo_tiles
from nestling.ssl.data.sources.base import ImageSource
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation import pictures
from nestling.ssl.evaluation.online import OnlineKnn
from nestling.ssl.names import printable
from nestling.ssl.run.log import read
from nestling.ssl.run.progress import console

logger = logging.getLogger("nestling")

POOLINGS = {"cls": "class token", "mean_patch": "mean patch"}
PIXELS, UNTRAINED, LEARNED = "raw pixels", "untrained network", "learned network"
LARGEST_PICTURED = 768  # pixels of the short side: the picture must cost less memory than a step
PICTURED_PHOTOGRAPH = "chelsea"  # a cat: one thing to attend to, before a soft background


def show(
    run: Path,
    backbone: Backbone,
    knn: OnlineKnn | None,
    images: ImageSource,
    config: Config,
    accelerator: Accelerator,
) -> None:
    """Print raw pixels, the untrained and the learned network side by side; draw picture.png.

    Called by all processes, as they share the work of k-NN; the main one prints and draws. Without
    labels there is nothing to print.
    """
    if knn is None:
        logger.info(f"done: checkpoints and log in {run}; without k-NN there is no table and no picture")
        return
    pixels = knn.judge_pixels(accelerator.device)
    queries = knn.examples(backbone, accelerator.device)
    if not accelerator.is_main_process:
        return
    records = [
        record for record in read(run / "log.jsonl") if any(name.startswith("knn/") for name in record)
    ]
    console.print(table(records, next(iter(pixels.values())), config))
    draw(run, backbone, queries, whole_image(images), records, next(iter(pixels.values())), config)
    logger.info(f"done: checkpoints, log and picture.png in {run}")


def columns(records: list[dict[str, float]], config: Config) -> dict[str, str]:
    """Per pooling, the name of its first k-NN accuracy in the log."""
    return {
        pooling: next(name for name in records[-1] if name.startswith(f"knn/{pooling}/top1"))
        for pooling in config.knn.pooling
    }


def table(records: list[dict[str, float]], pixels: float, config: Config) -> Table:
    """k-NN accuracy before and after training, against raw pixels."""
    names = columns(records, config)
    k = next(iter(names.values())).rpartition("_k")[2]
    result = Table(title=f"k-NN accuracy on held-out images (k = {k})", title_justify="left")
    result.add_column("")
    for pooling in names:
        result.add_column(POOLINGS[pooling], justify="right")
    result.add_row(PIXELS, *[f"{pixels:.1%}"] * len(names))
    for title, record in ((UNTRAINED, records[0]), (LEARNED, records[-1])):
        result.add_row(title, *[f"{record[name]:.1%}" for name in names.values()])
    return result


def whole_image(images: ImageSource) -> np.ndarray:
    """What is drawn on: a whole photograph of the embedded set, else the first readable image."""
    if images.name == photo_tiles.PhotoTiles.name:
        return photo_tiles.photograph(PICTURED_PHOTOGRAPH)
    for index in range(len(images)):
        try:
            return images.load(index)
        except UnreadableError:
            continue
    raise UserError(f"no image of {printable(images.name)} can be read any more")


def draw(
    run: Path,
    backbone: Backbone,
    queries: list[pictures.Query],
    photo: np.ndarray,
    records: list[dict[str, float]],
    pixels: float,
    config: Config,
) -> None:
    """Neighbours, where it looks at several resolutions and the curve of k-NN, as picture.png."""
    size = max(config.views.global_size)
    maps = []
    for side in dict.fromkeys(min(factor * size, LARGEST_PICTURED) for factor in (2, 4, 8)):
        focus = pictures.focus_map(
            backbone,
            photo,
            side,
            *normalisation(config.data),
            next(backbone.parameters()).device,
        )
        maps.append((f"short side {side} px", focus))
    names = columns(records, config)
    series = {
        POOLINGS[pooling]: [(record["epoch"], record[name]) for record in records]
        for pooling, name in names.items()
    }
    bars = {PIXELS: pixels, UNTRAINED: records[0][names[config.knn.pooling[0]]]}
    title = f"{config.backbone.name} after self-distillation, no labels, epochs: {config.train.epochs}"
    page = pictures.summary(title, queries, photo, maps, backbone.has_attention, series, bars)
    page.save(run / "picture.png")
