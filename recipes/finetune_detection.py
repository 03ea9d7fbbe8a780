"""How well does it detect? Train Mask R-CNN on the backbone's pyramid, judge boxes and masks as COCO does.

    python recipes/finetune_detection.py runs/pretrain data.train=/coco/annotations/instances_train2017.json …

A run directory stands for its best checkpoint, else its newest. Needs the extra `detection` (pycocotools).
"""

import importlib.util

from nestling.ssl.command_line import read, run
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.detection.settings import FineTuneDetection


def main(argv: list[str]) -> None:
    """Read the settings, train, print the average precisions and write them to the folder results."""
    settings = read(
        FineTuneDetection,
        argv,
        program="recipes/finetune_detection.py",
        about=__doc__ or "",
        positional=("checkpoint",),
    )
    if importlib.util.find_spec("pycocotools") is None:
        raise UserError("detection needs pycocotools; pip install 'nestling[detection]'")
    # Late, as these import torch: --help answers at once.
    from nestling.ssl.evaluation.detection.finetune import finetune_detection
    from nestling.ssl.run.memory import running_out_named

    with running_out_named({"train.batch_size": settings.train.batch_size}):
        finetune_detection(settings)


if __name__ == "__main__":
    run(main)
