"""What do the features say without labels? Their rank, spectrum, spread, and agreement with another network.

    python recipes/eval_unlabelled.py runs/pretrain
    accelerate launch recipes/eval_unlabelled.py runs/pretrain other=runs/another 'k=[5, 20]'
    python recipes/eval_unlabelled.py runs/pretrain 'others=[runs/another, runs/a_third]'

A run directory stands for its best checkpoint, else its newest. The images are those of data.val, or what is
held out of data.train, else all of data.train; a weights file needs data.train.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nestling.ssl.command_line import read, run
from nestling.ssl.config import key
from nestling.ssl.evaluation.settings import Evaluation
from nestling.ssl.names import printable

if TYPE_CHECKING:
    from nestling.ssl.evaluation.features import Rows
    from nestling.ssl.evaluation.unlabelled.judge import UnlabelledJudge
    from nestling.ssl.trained import Trained


@dataclass
class UnlabelledSettings:
    """How the images are shown; null: as the run had it."""

    pooling: list[str] | None = key(None, "vectors judged: cls, mean_patch, cls+mean_patch, last4:cls, …")
    size: int | None = key(None, "side of the image", low=1)
    crop_ratio: float | None = key(None, "that side over the resized short side", low=0.1, high=1)
    batch_size: int | None = key(None, "images per process", low=1)
    backend: str | None = key(None, "who finds neighbours", choices=("auto", "faiss", "torch"))


@dataclass
class EvalUnlabelled(Evaluation):
    """One evaluation."""

    other: str | None = key(None, "another run, checkpoint or weights file, whose neighbours are compared")
    other_network: str = key("teacher", "whose backbone of that", choices=("teacher", "student"))
    others: list[str] = key([], "further ones to rank, each with what it shares with the first")
    k: list[int] = key([10], "nearest images that are compared", low=1)
    max_images: int = key(10_000, "images looked at, evenly chosen", low=2)
    knn: UnlabelledSettings = field(default_factory=UnlabelledSettings)


def main(argv: list[str]) -> None:
    """Judge one checkpoint, or several on the same images; prints a table and writes the results."""
    settings = read(
        EvalUnlabelled,
        argv,
        program="recipes/eval_unlabelled.py",
        about=__doc__ or "",
        positional=("checkpoint",),
    )
    # Late, as all of these import torch: --help answers at once.
    from nestling.ssl.data.sources.opening import opened_together
    from nestling.ssl.distributed import failing_together
    from nestling.ssl.evaluation.results import results_file
    from nestling.ssl.evaluation.together import on_the_same_images
    from nestling.ssl.evaluation.unlabelled.judge import UnlabelledJudge
    from nestling.ssl.evaluation.unlabelled.overlap import overlaps
    from nestling.ssl.run import processes
    from nestling.ssl.run.memory import running_out_named
    from nestling.ssl.run.progress import say_only_here

    trained = loaded(settings)
    configs = on_the_same_images(trained, settings.data, settings.knn)
    refuse_unfit(trained)
    accelerator = processes.join()
    say_only_here(accelerator.is_main_process)
    out = Path()
    with failing_together():
        if accelerator.is_main_process:
            out = results_file(trained[0], "unlabelled", settings, settings.out)
    place = (accelerator.process_index, accelerator.num_processes)
    judges, values, shared = list[UnlabelledJudge](), list[dict[str, float]](), list[dict[str, float]]()
    first: Rows | None = None
    for one, config in zip(trained, configs, strict=True):
        config.knn.max_val, config.knn.pooling = settings.max_images, configs[0].knn.pooling
        train, val = opened_together(config)
        judges.append(UnlabelledJudge(train if val is None else val, config, *place))
        with running_out_named({"knn.batch_size": config.knn.batch_size}):
            found = judges[-1].seen(one.backbone.to(accelerator.device), accelerator.device)
            values.append(judges[-1].values(found))
        one.backbone.cpu()
        first = found.images if first is None else first
        if one is not trained[0]:
            shared.append(overlaps(first, found.images, settings.k, configs[0].knn.backend))
    assert first is not None
    if accelerator.is_main_process:
        tell(out, settings, trained, judges[0], len(first.indices), values, shared)
    accelerator.end_training()


def loaded(settings: EvalUnlabelled) -> "list[Trained]":
    """The network that is judged, the one that it is compared with, and further ones."""
    from nestling.ssl.trained import load_trained

    trained = [load_trained(settings.checkpoint, settings.network)]
    if settings.other is not None:
        trained.append(load_trained(settings.other, settings.other_network))
    return trained + [load_trained(path, settings.network) for path in settings.others]


def refuse_unfit(trained: "Sequence[Trained]") -> None:
    """Refuse a size that a network can't take."""
    from nestling.ssl.run.loading import check_size

    for one in trained:
        check_size(one.backbone, one.size, "knn.size")


def tell(
    out: Path,
    settings: EvalUnlabelled,
    trained: "Sequence[Trained]",
    judge: "UnlabelledJudge",
    num_images: int,
    values: Sequence[Mapping[str, float]],
    shared: Sequence[Mapping[str, float]],
) -> None:
    """The results, then the tables on screen; `shared` is what each but the first has in common with that."""
    from nestling.ssl.evaluation.results import used_config, write_results
    from nestling.ssl.run.log import strict

    told = [{name: strict(value) for name, value in found.items()} for found in values]
    facts: dict[str, Any] = {
        "images": judge.images.name,
        "num_images": num_images,
        "unreadable": judge.ledger.paths(),
        "size": judge.size,
        "other": None,
    }
    compared = [
        {**one.facts(), "config": used_config(one), "results": found}
        for one, found in zip(trained[1:], told[1:], strict=True)
    ]
    common: Mapping[str, float] = {}
    if settings.other is not None:
        facts["other"], common = compared[0], shared[0]
    further = len(compared) - len(settings.others)
    facts["others"] = [
        {**one, "results": one["results"] | found}
        for one, found in zip(compared[further:], shared[further:], strict=True)
    ]
    write_results(out, trained[0], settings, {**told[0], **common}, **facts)
    title = f"{num_images} images of {printable(judge.images.name)}"
    if settings.others:
        rank(named(settings), told, shared, title)
    else:
        show(named(settings), told, common, title)


def named(settings: EvalUnlabelled) -> list[str]:
    """What the table calls the networks."""
    from nestling.ssl.evaluation.together import names_of

    if settings.other == settings.checkpoint and settings.network != settings.other_network:
        both = (f"{settings.checkpoint} {network}" for network in (settings.network, settings.other_network))
        return names_of([*both, *settings.others])
    return names_of([settings.checkpoint, *([settings.other] if settings.other else []), *settings.others])


def show(
    names: Sequence[str],
    values: Sequence[Mapping[str, float | None]],
    shared: Mapping[str, float],
    title: str,
) -> None:
    """A column for each network, then what they have in common."""
    from nestling.ssl.evaluation.results import show_table

    rows = [
        (
            name.removeprefix("features/"),
            *("–" if one[name] is None else f"{one[name]:.4g}" for one in values),
        )
        for name in values[0]
    ]
    show_table(title, ["features", *names], rows)
    if shared:
        common = [(name.removeprefix("features/"), value) for name, value in shared.items()]
        show_table("shared neighbours, %", ["features", "%"], common)


def rank(
    names: Sequence[str],
    values: Sequence[Mapping[str, float | None]],
    shared: Sequence[Mapping[str, float]],
    title: str,
) -> None:
    """A row for each network, those of largest rank first, with the first pooling's numbers."""
    from nestling.ssl.evaluation.results import show_table

    pooling = next(iter(values[0])).rpartition("/")[2]
    columns = [name for name in values[0] if name.endswith(f"/{pooling}")]
    overlap = next(iter(shared[0]))
    rows = [
        (name, *("–" if (value := one[column]) is None else f"{value:.4g}" for column in columns), in_common)
        for name, one, in_common in sorted(
            zip(names, values, ["–", *(found[overlap] for found in shared)], strict=True),
            key=lambda row: -(row[1][columns[0]] or 0),
        )
    ]
    heads = [column.split("/")[1] for column in columns]
    show_table(
        f"{title}, {pooling} by RankMe; {overlap.removeprefix('features/')} with {names[0]}",
        ["network", *heads, "overlap %"],
        rows,
    )


if __name__ == "__main__":
    run(main)
