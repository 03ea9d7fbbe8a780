"""How good are the features? Let the nearest training images vote on the class of each validation image.

    python recipes/eval_knn.py runs/pretrain
    accelerate launch recipes/eval_knn.py runs/pretrain/checkpoints/step_00001000 data.val=/images/val

A run directory stands for its best checkpoint, else its newest. What isn't given is as the run had it.
"""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from nestling.ssl.command_line import read, run
from nestling.ssl.config import Config, key
from nestling.ssl.errors import UserError


@dataclass
class EvalData:
    """Labelled images, such as one folder per class; classes are matched by name."""

    train: str | None = key(None, "images that vote; null: as the run had it")
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
class EvalSettings:
    """How they vote."""

    k: list[int] | None = key(None, "neighbours that vote; null: as the run had it", low=1)
    temperature: float | None = key(
        None, "votes weigh exp(similarity / temperature); null: as the run had it", low=1e-3
    )
    pooling: list[str] | None = key(
        None, "image vectors judged; null: as the run had it", choices=("cls", "mean_patch")
    )
    size: int | None = key(None, "side of the image; null: as the run had it", low=1)
    crop_ratio: float | None = key(
        None, "that side over the resized short side; null: as the run had it", low=0.1, high=1
    )
    batch_size: int | None = key(None, "images per process; null: as the run had it", low=1)
    backend: str | None = key(None, "who searches; null: as the run had it", choices=("faiss", "torch"))


@dataclass
class EvalKnn:
    """One evaluation."""

    checkpoint: str = key("???", "run directory, or one of its checkpoint folders")
    network: str = key("teacher", "whose backbone", choices=("teacher", "student"))
    out: str | None = key(None, "file of the results; null: knn.json in the checkpoint folder")
    data: EvalData = field(default_factory=EvalData)
    knn: EvalSettings = field(default_factory=EvalSettings)


def main(argv: list[str]) -> None:
    """Judge one checkpoint; prints a table and writes knn.json."""
    settings = read(
        EvalKnn, argv, program="recipes/eval_knn.py", about=__doc__ or "", positional=("checkpoint",)
    )
    # Late, as all of these import torch: --help answers at once.
    from nestling.ssl.data.sources.opening import opened_together
    from nestling.ssl.evaluation.online import OnlineKnn
    from nestling.ssl.run import processes
    from nestling.ssl.run.directory import writable
    from nestling.ssl.run.loading import check_size, find_checkpoint, load_backbone
    from nestling.ssl.run.memory import IN_EVALUATION, running_out_explained
    from nestling.ssl.run.progress import say_only_here

    checkpoint = find_checkpoint(settings.checkpoint)
    out = writable(Path(settings.out) if settings.out else checkpoint / "knn.json")
    backbone, config = load_backbone(checkpoint, settings.network)
    override(config, settings)
    accelerator = processes.join()
    say_only_here(accelerator.is_main_process)
    train, val = opened_together(config)
    if val is None:
        raise UserError(
            f"k-NN needs labels and data.train={train.name} has none to hold out; "
            "give data.train and data.val, such as folders of class folders, or lists with labels"
        )
    config.knn.max_train, config.knn.max_val = len(train), len(val)
    place = (accelerator.process_index, accelerator.num_processes)
    judge = OnlineKnn(train, val, config, *place, search_threads=None)
    check_size(backbone, judge.size, "knn.size")
    with running_out_explained(config, IN_EVALUATION):
        results = judge.judge(backbone.to(accelerator.device), accelerator.device)
    if accelerator.is_main_process:
        report(settings, checkpoint, out, config, judge, results)
    accelerator.end_training()


def override(config: Config, settings: EvalKnn) -> None:
    """Put what was given on the command line in the place of what the run had."""
    for section in ("data", "knn"):
        given = getattr(settings, section)
        for item in fields(given):
            value = getattr(given, item.name)
            if value is not None:
                setattr(getattr(config, section), item.name, value)


def report(
    settings: EvalKnn, checkpoint: Path, out: Path, config: Config, judge: Any, results: dict[str, float]
) -> None:
    """Print the table and write the results with all that they depend on."""
    from nestling.ssl.run.directory import write_json
    from nestling.ssl.run.loading import saved_step

    num_train, num_val = judge.num_readable
    show(f"{settings.network} of {checkpoint}, {num_train} + {num_val} images", results)
    write_json(
        out,
        {
            "checkpoint": str(checkpoint),
            "network": settings.network,
            "step": saved_step(checkpoint),
            "backbone": config.backbone.name,
            "data": {"train": judge.train.name, "val": judge.val.name},
            "num_train": num_train,
            "num_val": num_val,
            "unreadable": judge.ledger.paths(),
            "num_classes": len(judge.class_names),
            "size": judge.size,
            "temperature": config.knn.temperature,
            "results": results,
        },
    )
    print(f"written to {out}")


def show(title: str, results: dict[str, float]) -> None:
    """A table with a row for each pooling and k."""
    from rich.console import Console
    from rich.table import Table

    rows: dict[tuple[str, str], dict[str, float]] = {}
    for name, value in results.items():
        _, pooling, measure = name.split("/")
        top, k = measure.split("_k")
        rows.setdefault((pooling, k), {})[top] = value
    tops = list(dict.fromkeys(top for row in rows.values() for top in row))
    table = Table("features", "k", *(f"{top.replace('top', 'top-')} %" for top in tops))
    for (pooling, k), row in rows.items():
        table.add_row(pooling, k, *(f"{100 * row[top]:.1f}" for top in tops))
    print(f"k-NN of the {title}")
    Console().print(table)


if __name__ == "__main__":
    run(main)
