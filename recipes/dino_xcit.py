"""DINO on XCiT: pretrain on a folder of images, no labels needed.

    accelerate launch recipes/dino_xcit.py                         # embedded photo tiles, minutes on a CPU
    accelerate launch recipes/dino_xcit.py data.train=/my/images   # XCiT-S12/16 as published

The folder may be flat or nested; where its first-level folders are classes, k-NN judges by them.
"""

from nestling.ssl.command_line import run
from nestling.ssl.recipe import pretraining_config


def main(argv: list[str]) -> None:
    """Read the settings, pretrain, show what was learned."""
    config = pretraining_config(
        argv, __file__, __doc__ or "", published="dino_xcit_small_12_p16", demo="photo_tiles"
    )
    from nestling.ssl.pretraining import pretrain  # late: `--help` needs no torch

    pretrain(config)


if __name__ == "__main__":
    run(main)
