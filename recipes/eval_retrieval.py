"""Does the backbone find the same building again? mAP on revisited Oxford or Paris, or in that format.

    python recipes/eval_retrieval.py runs/pretrain folder=roxford5k
    python recipes/eval_retrieval.py runs/pretrain folder=roxford5k multiscale=true size=512

The folder holds gnd_*.pkl (or the same as .json) and the images in jpg/. It runs in one process.
"""

from dataclasses import dataclass
from pathlib import Path

from nestling.ssl.command_line import read, run
from nestling.ssl.config import key
from nestling.ssl.errors import UserError
from nestling.ssl.names import printable

PROGRAM = "recipes/eval_retrieval.py"


@dataclass
class EvalRetrieval:
    """One evaluation; the defaults are those of DINO, but for crop_queries, which it leaves out."""

    checkpoint: str = key("???", "run directory, one of its checkpoint folders, or a weights file")
    folder: str = key("???", "where jpg/ and the ground truth lie")
    network: str = key("teacher", "whose backbone", choices=("teacher", "student"))
    out: str | None = key(None, "file of the results; null: in the folder results of the run")
    ground_truth: str | None = key(None, "file; null: the only gnd_*.pkl or gnd_*.json in the folder")
    size: int = key(224, "the longer side at most; smaller images stay as they are", low=1)
    multiscale: bool = key(False, "average the vector over the scales 1, 0.71 and 0.5")
    crop_queries: bool = key(True, "look at the box of a query alone, as the benchmark says")
    pooling: str = key("cls", "vector of an image: cls, mean_patch, cls+mean_patch, last4:cls, …")
    max_bad_share: float = key(0.1, "unreadable share of the images at which it stops", low=0, high=0.5)


def main(argv: list[str]) -> None:
    """Judge one checkpoint; prints a table and writes the results."""
    settings = read(
        EvalRetrieval, argv, program=PROGRAM, about=__doc__ or "", positional=("checkpoint", "folder")
    )
    # Late, as all of these import torch: --help answers at once.
    from nestling.ssl.data.ledger import Ledger
    from nestling.ssl.evaluation.alone import device_alone
    from nestling.ssl.evaluation.results import results_file, show_table, write_results
    from nestling.ssl.evaluation.retrieval.describing import SCALES, Describer, judge_retrieval
    from nestling.ssl.evaluation.retrieval.ground_truth import find_ground_truth, read_ground_truth
    from nestling.ssl.evaluation.retrieval.ranking import KS, PROTOCOLS
    from nestling.ssl.run.memory import running_out_named
    from nestling.ssl.run.progress import say_only_here
    from nestling.ssl.trained import load_trained

    folder = Path(settings.folder).expanduser()
    if not (folder / "jpg").is_dir():
        raise UserError(f"folder={printable(folder)} holds no folder jpg with the images")
    file = settings.ground_truth or find_ground_truth(folder)
    truth = read_ground_truth(file)
    trained = load_trained(settings.checkpoint, settings.network)
    device = device_alone(PROGRAM)
    say_only_here(True)
    out = results_file(trained, "retrieval", settings, settings.out)
    scales = SCALES if settings.multiscale else SCALES[:1]
    data, backbone = trained.config.data, trained.backbone.to(device)
    describer = Describer(backbone, data, settings.size, settings.pooling, scales, device)
    ledger = Ledger(settings.max_bad_share, len(truth.images) + len(truth.queries), "max_bad_share")
    with running_out_named({"size": settings.size}):
        results = judge_retrieval(truth, folder / "jpg", data, describer, settings.crop_queries, ledger)
    measures = ("map", *(f"mp{k}" for k in KS))
    rows = [
        (name, *("–" if (value := results[f"{name}/{measure}"]) is None else value for measure in measures))
        for name in PROTOCOLS
    ]
    title = f"retrieval, {trained.title}, {len(truth.queries)} queries in {len(truth.images)} images"
    facts = {"num_images": len(truth.images), "num_queries": len(truth.queries), "scales": list(scales)}
    write_results(out, trained, settings, results, ground_truth=str(file), unreadable=ledger.paths(), **facts)
    show_table(title, ["protocol", "mAP %", *(f"mP@{k} %" for k in KS)], rows)


if __name__ == "__main__":
    run(main)
