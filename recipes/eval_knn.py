"""How good are the features? Let the nearest training images vote on the class of each validation image.

    python recipes/eval_knn.py runs/pretrain
    accelerate launch recipes/eval_knn.py runs/pretrain/checkpoints/step_00001000 data.val=/images/val

A run directory stands for its best checkpoint, else its newest. What isn't given is as the run had it;
a weights file needs data.train.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nestling.ssl.command_line import read, run
from nestling.ssl.config import key
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.settings import Evaluation, override
from nestling.ssl.names import printable

if TYPE_CHECKING:
    from nestling.ssl.evaluation.knn.judge import Judgement, KnnJudge
    from nestling.ssl.trained import Trained


@dataclass
class KnnSettings:
    """How they vote, and how they are found."""

    k: list[int] | None = key(None, "neighbours that vote; null: as the run had it", low=1)
    temperature: float | None = key(
        None, "votes weigh exp(similarity / temperature); null: as the run had it", low=1e-3
    )
    pooling: list[str] | None = key(
        None, "vectors judged: cls, mean_patch, cls+mean_patch, last4:cls, …; null: as the run had it"
    )
    size: int | None = key(None, "side of the image; null: as the run had it", low=1)
    crop_ratio: float | None = key(
        None, "that side over the resized short side; null: as the run had it", low=0.1, high=1
    )
    batch_size: int | None = key(None, "images per process; null: as the run had it", low=1)
    backend: str | None = key(
        None,
        "who searches, with the same results; null: as the run had it",
        choices=("auto", "faiss", "torch"),
    )
    index: str = key(
        "flat",
        "flat is exact; ivf and hnsw are faster, miss some and print how many",
        choices=("flat", "ivf", "hnsw"),
    )
    features_dir: str | None = key(
        None, "where training features lie meanwhile, as float16; null: in memory, as float32"
    )
    shots: list[int] = key([], "also with so many training images per class, as [1, 5, 10, 20]", low=1)
    repeats: int = key(5, "draws of those images, for the mean and standard deviation", low=1)
    seed: int = key(0, "of those draws", low=0, high=2**31 - 1)


@dataclass
class EvalKnn(Evaluation):
    """One evaluation."""

    knn: KnnSettings = field(default_factory=KnnSettings)


def main(argv: list[str]) -> None:
    """Judge one checkpoint; prints a table, writes the results and CSV files beside them."""
    settings = read(
        EvalKnn, argv, program="recipes/eval_knn.py", about=__doc__ or "", positional=("checkpoint",)
    )
    # Late, as all of these import torch: --help answers at once.
    from nestling.ssl.data.sources.opening import opened_together
    from nestling.ssl.distributed import failing_together
    from nestling.ssl.evaluation.knn.judge import KnnJudge, Search
    from nestling.ssl.evaluation.readouts import readout
    from nestling.ssl.evaluation.results import results_file
    from nestling.ssl.run import processes
    from nestling.ssl.run.loading import check_size
    from nestling.ssl.run.memory import IN_EVALUATION, running_out_explained
    from nestling.ssl.run.progress import say_only_here
    from nestling.ssl.trained import load_trained

    trained = load_trained(settings.checkpoint, settings.network)
    config, given = trained.config, settings.knn
    override(config, "data", settings.data)
    override(config, "knn", given)
    trained.refuse_nowhere()
    for pooling in config.knn.pooling:
        readout(pooling)
    check_size(trained.backbone, trained.size, "knn.size")
    accelerator = processes.join()
    say_only_here(accelerator.is_main_process)
    out = Path()
    with failing_together():
        if accelerator.is_main_process:
            out = results_file(trained, "knn", settings, settings.out)
    train, val = opened_together(config)
    if val is None:
        raise UserError(
            f"k-NN needs labels and data.train={printable(train.name)} has none to hold out; "
            "give data.train and data.val, such as folders of class folders, or lists with labels"
        )
    search = Search(given.index, given.features_dir, given.shots, given.repeats, given.seed)
    place = (accelerator.process_index, accelerator.num_processes)
    judge = KnnJudge(train, val, config, search, *place)
    with running_out_explained(config, IN_EVALUATION):
        found = judge.judge(trained.backbone.to(accelerator.device), accelerator.device)
    if accelerator.is_main_process:
        report(settings, trained, out, judge, found)
    accelerator.end_training()


def report(settings: EvalKnn, trained: "Trained", out: Path, judge: "KnnJudge", found: "Judgement") -> None:
    """Write the results with all that they depend on, and print the tables."""
    from nestling.ssl.evaluation.knn.tables import write_tables
    from nestling.ssl.evaluation.results import write_results

    files = write_tables(out, found.confusions, judge.class_names)
    facts = {**judge.facts(), "recall": found.recall, "shots": found.shots, "files": files}
    write_results(out, trained, settings, found.results, **facts)
    print(f"k-NN of the {trained.title}")
    show(judge, found)


def show(judge: "KnnJudge", found: "Judgement") -> None:
    """Tables with a row for each pooling and k, and for each number of shots."""
    from nestling.ssl.evaluation.results import show_table

    rows: dict[tuple[str, str], dict[str, float]] = {}
    for name, value in found.results.items():
        _, pooling, measure = name.split("/")
        top, k = measure.split("_k")
        rows.setdefault((pooling, k), {})[top] = value
        if top == "top1" and pooling in found.recall:
            rows[pooling, k]["recall"] = found.recall[pooling][f"recall_k{k}"]
    names = {"top1": "top-1 %", "top5": "top-5 %", "recall": "recall of the index %"}
    used = [name for name in names if any(name in row for row in rows.values())]
    num_train, num_val = judge.num_readable
    show_table(
        f"{num_train} images vote on {num_val}",
        ["features", "k", *(names[name] for name in used)],
        [(pooling, k, *(row[name] for name in used)) for (pooling, k), row in rows.items()],
    )
    if found.recall:
        print(f"knn.index={judge.search.index} misses neighbours and so biases the accuracy: see its recall")
    few: list[list[Any]] = [
        [
            pooling,
            shots,
            measure.partition("_k")[2],
            value["mean"],
            "–" if value["std"] is None else value["std"],
        ]
        for pooling, by_shots in found.shots.items()
        for shots, measures in by_shots.items()
        for measure, value in measures.items()
        if measure.startswith("top1")
    ]
    if few:
        title = f"few images per class, {judge.search.repeats} draws"
        show_table(title, ["features", "images per class", "k", "top-1 %", "± %"], few)


if __name__ == "__main__":
    run(main)
