"""DINO on XCiT: pretrain on a folder of images, no labels needed.

    accelerate launch recipes/dino_xcit.py                         # embedded photo tiles, minutes on a CPU
    accelerate launch recipes/dino_xcit.py data.train=/my/images   # XCiT-S12/16 as published

The folder may be flat or nested; where its first-level folders are classes, k-NN judges by them.
"""

from collections.abc import Mapping
from pathlib import Path

from nestling.ssl.command_line import read, run
from nestling.ssl.config import Config

CONFIGS = Path(__file__).parent / "configs"


def default_config(settings: Mapping[str, str]) -> str:
    """The published recipe for images of one's own, a small one for the embedded tiles."""
    return (
        "photo_tiles"
        if settings.get("data.train", "photo-tiles") == "photo-tiles"
        else "dino_xcit_small_12_p16"
    )


def main(argv: list[str]) -> None:
    """Read the settings, pretrain, show what was learned."""
    config = read(
        Config,
        argv,
        program="recipes/dino_xcit.py",
        about=__doc__ or "",
        configs=CONFIGS,
        default=default_config,
    )
    from nestling.ssl.pretraining import pretrain  # late: `--help` needs no torch

    pretrain(config)


if __name__ == "__main__":
    run(main)
