"""A run that watches its features learns the same as one that doesn't."""

import shutil
from dataclasses import replace
from math import isfinite
from pathlib import Path

import pytest
from config_observers import run
from image_folder import write_image_folder
from small_checkpoint import small_run

from nestling.ssl.config import Config, Knn
from nestling.ssl.data.sources.opening import open_source
from nestling.ssl.evaluation.unlabelled.judge import UnlabelledJudge
from nestling.ssl.evaluation.unlabelled.overlap import overlaps
from nestling.ssl.run import checkpoints
from nestling.ssl.run.loading import load_backbone
from nestling.ssl.run.log import read


def started(
    folder: Path, name: str, train: dict[str, object] | None = None, **knn: object
) -> tuple[Config, str]:
    config = replace(small_run(folder / name, **(train or {})), knn=Knn(k=[3], **knn))
    return config, run(config)


def records(config: Config) -> list[dict[str, float]]:
    return [record for record in read(Path(config.out) / "log.jsonl") if "features/rankme/cls" in record]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """A folder with images without classes."""
    folder = tmp_path_factory.mktemp("plain")
    write_image_folder(folder / "images", classes=1, per_class=12, size=20)
    return folder


def test_watching_changes_nothing_that_is_learned(tmp_path):
    write_image_folder(tmp_path / "images", classes=2, per_class=6, size=20)
    watched, _ = started(tmp_path, "watched", every=1, unlabelled=True)
    unwatched, _ = started(tmp_path, "unwatched", every=0)
    saved = [checkpoints.load(checkpoints.newest(Path(config.out))) for config in (watched, unwatched)]
    for network in ("student", "teacher"):
        one, other = (getattr(checkpoint, network) for checkpoint in saved)
        assert all(bool((one[name] == other[name]).all()) for name in one | other), network
    found = records(watched)
    assert [record["epoch"] for record in found] == [0, 1, 2, 3, 4]
    assert all("knn/cls/top1_k3" in record for record in found)
    assert saved[0].trainer["best"] == max(
        record["knn/cls/top1_k3"] for record in found[1:-1]
    )  # before its own


def test_without_labels_features_are_logged_and_no_checkpoint_is_the_best(plain):
    config, said = started(plain, "watched", every=1)
    assert "judged without labels on 12 images of" in said
    found = records(config)
    assert [record["epoch"] for record in found] == [0, 1, 2, 3, 4]
    names = [[name for name in record if name.startswith("features/")] for record in found]
    four = [f"features/{kind}/cls" for kind in ("rankme", "alpha_req", "uniformity", "alignment")]
    assert names == [four, *[[*four, "features/overlap/cls_k10"]] * 4]  # the first has none before it
    assert all(isfinite(record[name]) for record in found for name in four)
    assert f"features/rankme/cls {found[-1]['features/rankme/cls']:.4g}" in said
    # A rank may fall while features get better: it decides nothing by itself.
    assert checkpoints.pointed(Path(config.out), checkpoints.BEST) is None


def test_the_overlap_is_that_of_two_checkpoints_and_a_resumed_run_logs_the_same(plain):
    config, _ = started(plain, "alone", every=1, train={"epochs": 3, "checkpoint_every": 0.34})
    out, judge = Path(config.out), UnlabelledJudge(open_source(config.data, "train"), config)
    second, third = (load_backbone(out / f"checkpoints/step_{step:08d}", "teacher")[0] for step in (6, 9))
    sides = [judge.seen(backbone, "cpu").images for backbone in (second, third)]
    expected = overlaps(*sides, [10])["features/overlap/cls_k10"]
    logged = [record["features/overlap/cls_k10"] for record in records(config)[1:]]
    assert logged[2] == expected < 1
    lines = (out / "log.jsonl").read_text().splitlines(keepends=True)
    for step in (6, 7):  # after an evaluation that the checkpoint is older than, and on the way to the next
        going_on = replace(config, out=str(plain / f"from_{step}"), resume="auto")
        folder = Path(going_on.out)
        shutil.copytree(out, folder)
        for later in checkpoints.saved(folder)[step:]:
            shutil.rmtree(later)
        (folder / "log.jsonl").write_text("".join(lines[: 1 + step]))
        run(going_on)
        assert [record["features/overlap/cls_k10"] for record in records(going_on)[1:]] == logged


def test_it_can_be_left_out(plain):
    config, said = started(plain, "unwatched", every=1, unlabelled=False)
    assert not records(config)
    assert "judged without labels" not in said
