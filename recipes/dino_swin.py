"""DINO on Swin: pretrain on a folder of images, no labels needed.

    accelerate launch recipes/dino_swin.py data.train=/my/images   # Swin-T with window 7 as EsViT trains it

The folder may be flat or nested; where its first-level folders are classes, k-NN judges by them.
"""

from nestling.ssl.command_line import run
from nestling.ssl.recipe import pretraining_config


def main(argv: list[str]) -> None:
    """Read the settings, pretrain, show what was learned."""
    config = pretraining_config(argv, __file__, __doc__ or "", published="dino_swin_tiny_w7")
    from nestling.ssl.pretraining import pretrain  # late: `--help` needs no torch

    pretrain(config)


if __name__ == "__main__":
    run(main)
