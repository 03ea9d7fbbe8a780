"""DINO on ViT: pretrain on a folder of images, no labels needed.

    accelerate launch recipes/dino_vit.py data.train=/my/images   # ViT-S/16 as published, 100 epochs

The folder may be flat or nested; where its first-level folders are classes, k-NN judges by them.
"""

from nestling.ssl.command_line import run
from nestling.ssl.recipe import pretraining_config


def main(argv: list[str]) -> None:
    """Read the settings, pretrain, show what was learned."""
    config = pretraining_config(argv, __file__, __doc__ or "", published="dino_vit_small_p16")
    from nestling.ssl.pretraining import pretrain  # late: `--help` needs no torch

    pretrain(config)


if __name__ == "__main__":
    run(main)
