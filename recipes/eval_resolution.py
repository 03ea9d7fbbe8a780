"""How robust is a backbone to the size of images? Accuracy, speed and memory over a list of test sizes.

    python recipes/eval_resolution.py runs/pretrain
    accelerate launch recipes/eval_resolution.py runs/xcit others='[runs/vit]' sizes='[96, 160, 224, 224x320]'

A run directory stands for its best checkpoint, else its newest. All networks are judged on the images of the
first one; what isn't given is as each run had it. A weights file needs data.train.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nestling.ssl.command_line import read, run
from nestling.ssl.config import key
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.settings import Evaluation
from nestling.ssl.names import printable

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    from nestling.ssl.config import Config
    from nestling.ssl.evaluation.resolution.judge import ResolutionJudge, Results
    from nestling.ssl.evaluation.resolution.sizes import Size
    from nestling.ssl.trained import Trained


@dataclass
class VectorSettings:
    """What vector is judged, and how neighbours vote; null: as each run had it, the first of several."""

    k: list[int] | None = key(None, "neighbours that vote; the first counts", low=1)
    temperature: float | None = key(None, "votes weigh exp(similarity / temperature)", low=1e-3)
    pooling: list[str] | None = key(None, "cls, mean_patch, cls+mean_patch, last4:cls, …; the first counts")
    size: int | None = key(None, "side of the training images with train_size=own", low=1)
    crop_ratio: float | None = key(
        None, "share of the short side that a square shows, at every size", low=0.1, high=1
    )
    batch_size: int | None = key(None, "images per process", low=1)
    backend: str | None = key(None, "who finds neighbours", choices=("auto", "faiss", "torch"))


@dataclass
class Timing:
    """How speed and memory are measured: on the main process, in float32."""

    batch_size: int = key(32, "images of a batch", low=1)
    repeats: int = key(10, "batches whose median counts, after two that warm up", low=1)


@dataclass
class EvalResolution(Evaluation):
    """One evaluation."""

    others: list[str] = key([], "further runs, checkpoints or weights files to compare")
    sizes: list[str] | None = key(
        None,
        "test sizes in pixels: a side, or height x width as 224x320; null: half to twice the run's own",
    )
    train_size: str = key(
        "own", "training images at the run's own size, or at each test size", choices=("own", "test")
    )
    knn: VectorSettings = field(default_factory=VectorSettings)
    timing: Timing = field(default_factory=Timing)


def main(argv: list[str]) -> None:
    """Judge all networks at all sizes; prints a table, writes results, a CSV and a picture."""
    settings = read(
        EvalResolution,
        argv,
        program="recipes/eval_resolution.py",
        about=__doc__ or "",
        positional=("checkpoint",),
    )
    # Late, as all of these import torch: --help answers at once.
    from nestling.ssl.distributed import failing_together
    from nestling.ssl.evaluation.resolution.sizes import around, read_sizes, refuse_unfit
    from nestling.ssl.evaluation.results import results_file
    from nestling.ssl.evaluation.together import names_of, on_the_same_images
    from nestling.ssl.run import processes
    from nestling.ssl.run.loading import check_size
    from nestling.ssl.run.memory import running_out_named
    from nestling.ssl.run.progress import say_only_here
    from nestling.ssl.trained import load_trained

    paths = [settings.checkpoint, *settings.others]
    names = names_of(paths)
    trained = {name: load_trained(path, settings.network) for name, path in zip(names, paths, strict=True)}
    on_the_same_images([*trained.values()], settings.data, settings.knn)
    first = trained[names[0]]
    sizes = read_sizes(
        around(first.size, first.backbone.stride) if settings.sizes is None else settings.sizes
    )
    for one in trained.values():
        refuse_unfit(one.backbone, list(sizes.values()))
        if settings.train_size == "own":
            check_size(one.backbone, one.size, "knn.size")
    accelerator = processes.join()
    say_only_here(accelerator.is_main_process)
    out = Path()
    with failing_together():
        if accelerator.is_main_process:
            out = results_file(first, "resolution", settings, settings.out)
    judges = {name: judge_of(one.config, accelerator) for name, one in trained.items()}
    found: dict[str, Results] = {}
    for name, one in trained.items():
        how = (sizes, settings.train_size, settings.timing.batch_size, settings.timing.repeats)
        with running_out_named({"knn.batch_size": one.config.knn.batch_size}):
            backbone = one.backbone.to(accelerator.device)
            found[name] = judges[name].judge(backbone, accelerator.device, *how)
        backbone.cpu()  # the memory of the next one is measured alone
    if accelerator.is_main_process:
        tell(out, settings, sizes, trained, judges, found, accelerator.device)
    accelerator.end_training()


def judge_of(config: "Config", accelerator: "Accelerator") -> "ResolutionJudge":
    """Who judges a network on the images that its config names."""
    from nestling.ssl.data.sources.opening import opened_together
    from nestling.ssl.evaluation.resolution.judge import ResolutionJudge

    train, val = opened_together(config)
    if val is None:
        raise UserError(
            f"accuracy needs labels and data.train={printable(train.name)} has none to hold out; give "
            "data.train and data.val, such as folders of class folders, or lists with labels"
        )
    return ResolutionJudge(train, val, config, accelerator.process_index, accelerator.num_processes)


def tell(
    out: Path,
    settings: EvalResolution,
    sizes: "Mapping[str, Size]",
    trained: "Mapping[str, Trained]",
    judges: "Mapping[str, ResolutionJudge]",
    found: "Mapping[str, Results]",
    device: "torch.device",
) -> None:
    """The results, a CSV and a picture beside them; the table on screen."""
    from nestling.ssl.evaluation.resolution import report
    from nestling.ssl.evaluation.resolution.cost import machine
    from nestling.ssl.evaluation.results import show_table, used_config, write_results
    from nestling.ssl.run.disk import replaced

    first = next(iter(judges.values()))
    table, drawing = out.with_suffix(".csv"), out.with_suffix(".png")
    report.write_csv(table, found, sizes)
    with replaced(drawing) as draft:
        report.picture(found, sizes, settings.train_size).save(draft, format="PNG")
    facts = {
        "networks": {name: {**one.facts(), "config": used_config(one)} for name, one in trained.items()},
        "data": {"train": first.train.name, "val": first.val.name},
        "num_train": len(first.train),
        "num_val": len(first.val),
        "unreadable": first.ledger.paths(),
        "own_size": {name: judge.own_size for name, judge in judges.items()},
        "machine": machine(device),
        "files": [table.name, drawing.name],
    }
    write_results(out, next(iter(trained.values())), settings, found, **facts)
    show_table(
        f"{len(first.train)} training images, {len(first.val)} to judge",
        ["network", "size", *report.TITLES.values()],
        report.table_rows(found),
    )


if __name__ == "__main__":
    run(main)
