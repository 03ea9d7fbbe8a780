"""How much do patches know of what they show? Classes of pixels from frozen patch tokens, as mean IoU.

    python recipes/eval_segmentation.py runs/pretrain data.train=scenes/train data.val=scenes/val
    python recipes/eval_segmentation.py runs/pretrain protocol=knn data.train=scenes/train data.val=scenes/val

Each folder holds images/ and masks/, matched by name. It runs in one process.
"""

from dataclasses import dataclass, field

from nestling.ssl.command_line import read, run
from nestling.ssl.config import key
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.dense.settings import Linear, PatchKnn
from nestling.ssl.evaluation.settings import Evaluation, override

PROGRAM = "recipes/eval_segmentation.py"


@dataclass
class EvalSegmentation(Evaluation):
    """One evaluation."""

    protocol: str = key("linear", "a linear layer, or votes of training patches", choices=("linear", "knn"))
    size: int = key(512, "side of the windows, and the short side of a resized image", low=1)
    blocks: int = key(1, "last blocks whose patch tokens are concatenated: 1 or, as DINOv2 too, 4", low=1)
    num_classes: int | None = key(None, "classes; null: lines of classes.txt, else the largest id + 1", low=1)
    zero_is_ignored: bool = key(False, "ids count from 1, and 0 is no class, as in ADE20K")
    batch_size: int = key(16, "windows at once where images are judged", low=1)
    seed: int = key(0, "of the crops, their order, the layer and the patches in memory", low=0)
    linear: Linear = field(default_factory=Linear)
    knn: PatchKnn = field(default_factory=PatchKnn)


def main(argv: list[str]) -> None:
    """Judge one checkpoint; prints a table and writes the results, with a CSV of the classes beside them."""
    settings = read(EvalSegmentation, argv, program=PROGRAM, about=__doc__ or "", positional=("checkpoint",))
    # Late, as all of these import torch: --help answers at once.
    from nestling.ssl.evaluation.alone import device_alone
    from nestling.ssl.evaluation.dense.folder import MaskedImages, class_names
    from nestling.ssl.evaluation.dense.segmentation import Segmentation, write_classes
    from nestling.ssl.evaluation.labels import refuse_shared_files
    from nestling.ssl.evaluation.results import results_file, show_table, write_results
    from nestling.ssl.run.loading import check_size
    from nestling.ssl.run.memory import running_out_named
    from nestling.ssl.run.progress import say_only_here
    from nestling.ssl.trained import load_trained

    if settings.data.train is None or settings.data.val is None:
        raise UserError("give data.train and data.val, folders that hold images/ and masks/ each")
    trained = load_trained(settings.checkpoint, settings.network)
    config = trained.config
    override(config, "data", settings.data)
    config.seed = settings.seed
    check_size(trained.backbone, settings.size, "size")
    device = device_alone(PROGRAM)
    say_only_here(True)
    out = results_file(trained, f"segmentation_{settings.protocol}", settings, settings.out)
    train, val = (
        MaskedImages(path, config.data, name, settings.zero_is_ignored)
        for path, name in ((settings.data.train, "data.train"), (settings.data.val, "data.val"))
    )
    refuse_shared_files(train.images, val.images)
    names = class_names(train, settings.num_classes)
    judge = Segmentation(train, val, config, len(names), settings.size, settings.blocks, settings.batch_size)
    backbone = trained.backbone.to(device)
    portions = {"batch_size": settings.batch_size}
    if settings.protocol == "linear":
        portions["linear.batch_size"] = settings.linear.batch_size
    else:
        portions["knn.memory"] = settings.knn.memory
    with running_out_named(portions):
        if settings.protocol == "linear":
            confusion = judge.linear(backbone, device, settings.linear)
        else:
            confusion = judge.patch_knn(backbone, device, settings.knn)
    results, classes = confusion.results(), confusion.classes(names)
    title = f"{settings.protocol} segmentation, {trained.title}, {len(val)} images"
    shown = [(score.name, score.pixels, "–" if score.iou is None else score.iou) for score in classes]
    write_classes(out.with_suffix(".csv"), classes)
    write_results(
        out,
        trained,
        settings,
        results,
        classes=[score._asdict() for score in classes],
        num_train=len(train),
        num_val=len(val),
        unreadable=[*judge.train_ledger.paths(), *judge.ledger.paths()],
    )
    show_table(title, ["class", "pixels", "IoU %"], [*shown, ("mean", "", results["miou"])])


if __name__ == "__main__":
    run(main)
