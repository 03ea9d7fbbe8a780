"""Does an altered image find its original? mAP as DINO measures it on Copydays.

    python recipes/eval_copy_detection.py runs/pretrain folder=copydays
    python recipes/eval_copy_detection.py runs/pretrain folder=copydays distractors=others whitening=more

The folder holds original/ and folders of altered images. It runs in one process.
"""

from dataclasses import dataclass

from nestling.ssl.command_line import read, run
from nestling.ssl.config import key
from nestling.ssl.names import printable

PROGRAM = "recipes/eval_copy_detection.py"


@dataclass
class EvalCopyDetection:
    """One evaluation; the defaults are those of DINO."""

    checkpoint: str = key("???", "run directory, one of its checkpoint folders, or a weights file")
    folder: str = key("???", "where original/ and the folders of altered images lie")
    network: str = key("teacher", "whose backbone", choices=("teacher", "student"))
    out: str | None = key(None, "file of the results; null: in the folder results of the run")
    distractors: str | None = key(None, "folder of other images that are searched too; DINO takes 10,000")
    whitening: str | None = key(None, "folder of further images that PCA whitening learns from; DINO: 20,000")
    size: int = key(320, "side of the square that an image is squeezed to", low=1)
    batch_size: int = key(16, "images at once", low=1)
    prefix: int = key(4, "first letters of the file name that a copy shares with its original", low=1)
    depth: int = key(20, "places looked at; an original further down counts as not found", low=1)
    num_workers: int | None = key(None, "loader processes; null: as the run had it", low=0)
    max_bad_share: float = key(0.1, "unreadable share of the images at which it stops", low=0, high=0.5)


def main(argv: list[str]) -> None:
    """Judge one checkpoint; prints a table and writes the results."""
    settings = read(
        EvalCopyDetection, argv, program=PROGRAM, about=__doc__ or "", positional=("checkpoint", "folder")
    )
    # Late, as all of these import torch: --help answers at once.
    from nestling.ssl.data.ledger import Ledger
    from nestling.ssl.evaluation.alone import device_alone
    from nestling.ssl.evaluation.results import results_file, show_table, write_results
    from nestling.ssl.evaluation.retrieval.copies import blocks_of, describe, judge_copies, open_folders
    from nestling.ssl.evaluation.retrieval.whitening import learn_whitening
    from nestling.ssl.run.loading import check_size
    from nestling.ssl.run.memory import running_out_named
    from nestling.ssl.run.progress import say_only_here
    from nestling.ssl.trained import load_trained

    trained = load_trained(settings.checkpoint, settings.network)
    check_size(trained.backbone, settings.size, "size")
    device = device_alone(PROGRAM)
    say_only_here(True)
    out = results_file(trained, "copy_detection", settings, settings.out)
    data, backbone = trained.config.data, trained.backbone.to(device)
    if settings.num_workers is not None:
        data.num_workers = settings.num_workers
    sources = open_folders(
        {"folder": settings.folder, "distractors": settings.distractors, "whitening": settings.whitening},
        data,
    )
    blocks = blocks_of(sources["folder"], settings.folder)
    described, ledgers = {}, []
    with running_out_named({"batch_size": settings.batch_size, "size": settings.size}):
        for name, source in sources.items():
            ledgers.append(Ledger(settings.max_bad_share, len(source), "max_bad_share"))
            described[name] = describe(
                source, backbone, data, settings.size, settings.batch_size, device, ledgers[-1]
            )
    vectors = dict(zip(described["folder"][0].tolist(), described["folder"][1], strict=True))
    others = described["distractors"][1] if "distractors" in described else described["folder"][1][:0]
    whitening = learn_whitening(described["whitening"][1]) if "whitening" in described else None
    results = judge_copies(
        vectors, blocks, sources["folder"], others, whitening, settings.prefix, settings.depth
    )
    rows = [(printable(name), len(blocks[name]), value) for name, value in results.items()]
    write_results(
        out,
        trained,
        settings,
        {f"{name}/map": value for name, value in results.items()},
        num_images={name: len(source) for name, source in sources.items()},
        unreadable=[path for ledger in ledgers for path in ledger.paths()],
    )
    show_table(f"copy detection, {trained.title}", ["folder", "queries", "mAP %"], rows)


if __name__ == "__main__":
    run(main)
