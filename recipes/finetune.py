"""How far does it go with labels? Train the backbone and a linear classifier together on labelled images.

    accelerate launch recipes/finetune.py runs/pretrain data.train=/images/train data.val=/images/val
    accelerate launch recipes/finetune.py runs/pretrain --config finetune_deit data.train=/images/train

A run directory stands for its best checkpoint, else its newest. What isn't given is as the run had it.
"""

from pathlib import Path

from nestling.ssl.command_line import read, run
from nestling.ssl.evaluation.finetuning.settings import FineTune


def main(argv: list[str]) -> None:
    """Read the settings, fine-tune, print the accuracies and write them to the folder results."""
    path = Path(__file__)
    settings = read(
        FineTune,
        argv,
        program="recipes/finetune.py",
        about=__doc__ or "",
        configs=path.parent / "configs",
        positional=("checkpoint",),
    )
    # Late, as these import torch: --help answers at once.
    from nestling.ssl.evaluation.finetuning.finetune import finetune
    from nestling.ssl.run.memory import running_out_named

    with running_out_named({"train.batch_size": settings.train.batch_size}):
        finetune(settings)


if __name__ == "__main__":
    run(main)
