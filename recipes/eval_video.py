"""Do patches stay with their object? Masks of a first frame handed on through a video, as on DAVIS 2017.

    python recipes/eval_video.py runs/pretrain folder=DAVIS
    python recipes/eval_video.py runs/pretrain folder=DAVIS size=240 propagation.topk=10

The folder holds JPEGImages/480p, Annotations/480p and ImageSets/2017/val.txt. It runs in one process.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path

from nestling.ssl.command_line import read, run
from nestling.ssl.config import key
from nestling.ssl.evaluation.dense.settings import Propagation
from nestling.ssl.names import printable

PROGRAM = "recipes/eval_video.py"


@dataclass
class EvalVideo:
    """One evaluation; the defaults are those of DINO."""

    checkpoint: str = key("???", "run directory, one of its checkpoint folders, or a weights file")
    folder: str = key("???", "where JPEGImages, Annotations and ImageSets lie")
    network: str = key("teacher", "whose backbone", choices=("teacher", "student"))
    out: str | None = key(None, "file of the results; null: in the folder results of the run")
    masks: str | None = key(None, "folder of the masks found; null: beside the results, named as they are")
    split: str = key("2017/val", "list of videos, a file in ImageSets without .txt")
    resolution: str = key("480p", "folder below JPEGImages and Annotations")
    size: int = key(480, "the shorter side of a frame as the backbone sees it", low=1)
    propagation: Propagation = field(default_factory=Propagation)


def main(argv: list[str]) -> None:
    """Judge one checkpoint; prints a table, writes the results and the masks."""
    settings = read(
        EvalVideo, argv, program=PROGRAM, about=__doc__ or "", positional=("checkpoint", "folder")
    )
    # Late, as all of these import torch: --help answers at once.
    from nestling.ssl.evaluation.alone import device_alone
    from nestling.ssl.evaluation.dense.davis import Tracker, find_videos, judge_video, summary
    from nestling.ssl.evaluation.results import results_file, show_table, write_results
    from nestling.ssl.run.memory import running_out_named
    from nestling.ssl.run.progress import say_only_here
    from nestling.ssl.trained import load_trained

    videos = find_videos(Path(settings.folder).expanduser(), settings.split, settings.resolution)
    trained = load_trained(settings.checkpoint, settings.network)
    device = device_alone(PROGRAM)
    say_only_here(True)
    out = results_file(trained, "video", settings, settings.out)
    masks = Path(settings.masks).expanduser() if settings.masks else out.with_suffix("")
    backbone = trained.backbone.to(device)
    tracker = Tracker(backbone, trained.config.data, settings.size, settings.propagation, device)
    with running_out_named(
        {"size": settings.size, "propagation.last_frames": settings.propagation.last_frames}
    ):
        scores = [score for video in videos for score in judge_video(tracker, video, masks)]
    results = summary(scores) if scores else {}
    title = f"label propagation, {trained.title}, {len(videos)} videos"
    print(f"masks written to {printable(masks)}")
    write_results(
        out,
        trained,
        settings,
        results,
        masks=str(masks),
        videos=[video.name for video in videos],
        objects=[asdict(score) for score in scores],
    )
    show_table(title, ["measure", "%"], results.items() or [("no frame has a mask to compare with", "")])


if __name__ == "__main__":
    run(main)
