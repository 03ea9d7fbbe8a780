"""What the evaluation recipes let a user set in common: which network, on which images."""

from dataclasses import dataclass, field, fields
from typing import Any

from nestling.ssl.config import Config, key


@dataclass
class EvalData:
    """Labelled images, such as one folder per class; classes are matched by name."""

    train: str | None = key(None, "images to learn from; null: as the run had it")
    val: str | None = key(None, "images that are judged; null: as the run had it")
    num_workers: int | None = key(None, "loader processes per process; null: as the run had it", low=0)
    on_error: str | None = key(
        None,
        "unreadable images: leave out, or stop; null: as the run had it",
        choices=("skip", "raise"),
    )
    max_bad_share: float | None = key(
        None, "unreadable share of the images at which it stops; null: as the run had it", low=0, high=0.5
    )
    root: str | None = key(None, "where the files of torchvision:NAME lie; null: as the run had it")
    cache: str | None = key(None, "folder that remembers what a scan found; null: as the run had it")


@dataclass
class Evaluation:
    """What every evaluation takes; a recipe's schema adds its own keys."""

    checkpoint: str = key("???", "run directory, one of its checkpoint folders, or a weights file")
    network: str = key("teacher", "whose backbone", choices=("teacher", "student"))
    out: str | None = key(None, "file of the results; null: in the folder results of the run")
    data: EvalData = field(default_factory=EvalData)


def override(config: Config, section: str, given: Any) -> None:
    """Put what was given on the command line in the place of what the run had in that section."""
    for item in fields(given):
        value = getattr(given, item.name)
        if value is not None and hasattr(getattr(config, section), item.name):
            setattr(getattr(config, section), item.name, value)
