"""A run that watches its features learns the same as one that doesn't."""

from dataclasses import replace
from math import isfinite
from pathlib import Path

import pytest
from config_observers import run
from image_folder import write_image_folder
from small_checkpoint import small_run

from nestling.ssl.config import Config, Knn
from nestling.ssl.run import checkpoints
from nestling.ssl.run.log import read


def started(folder: Path, name: str, **knn: object) -> tuple[Config, str]:
    config = replace(small_run(folder / name), knn=Knn(k=[3], **knn))
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
    names = [name for name in found[0] if name.startswith("features/")]
    assert names == [f"features/{kind}/cls" for kind in ("rankme", "alpha_req", "uniformity", "alignment")]
    assert all(isfinite(record[name]) for record in found for name in names)
    assert f"features/rankme/cls {found[-1]['features/rankme/cls']:.4g}" in said
    # A rank may fall while features get better: it decides nothing by itself.
    assert checkpoints.pointed(Path(config.out), checkpoints.BEST) is None


def test_it_can_be_left_out(plain):
    config, said = started(plain, "unwatched", every=1, unlabelled=False)
    assert not records(config)
    assert "judged without labels" not in said
