"""eval_segmentation as a user starts it: the table, the files, and mistakes in one sentence."""

import csv
import json

import pytest
from dense_subjects import write_scenes, write_tiny_run

from nestling.recipes.eval_segmentation import main
from nestling.ssl.errors import UserError
from nestling.ssl.trained import load_trained

LINEAR = ["linear.steps=50", "linear.warmup_steps=2", "linear.batch_size=4", "linear.lr=0.1"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("segmentation")
    write_tiny_run(folder / "run")
    write_scenes(folder / "train")
    (folder / "train/classes.txt").write_text("ground\nred\ngreen\nsky\n")
    write_scenes(folder / "val", count=3, seed=1)
    (folder / "val/images/00/0002.png").write_text("no image")
    return folder


def judged(place, *more):
    data = [f"data.train={place}/train", f"data.val={place}/val", "data.max_bad_share=0.5", "size=40"]
    main([str(place / "run"), *data, *more])


@pytest.mark.parametrize("arguments", [LINEAR, ["protocol=knn", "blocks=2", "knn.k=5"]])
def test_colours_are_told_apart_and_everything_is_written(place, capsys, arguments):
    before = {
        name: value.clone() for name, value in load_trained(place / "run").backbone.state_dict().items()
    }
    judged(place, *arguments)
    protocol = "knn" if "protocol=knn" in arguments else "linear"
    (file,) = (place / "run/results").glob(f"segmentation_{protocol}_*.json")
    found = json.loads(file.read_text())
    assert found["results"]["miou"] > 0.8
    assert [score["name"] for score in found["classes"]] == ["ground", "red", "green", "sky"]
    assert found["classes"][3] == {"name": "sky", "pixels": 0, "iou": None, "accuracy": None}
    mean = sum(score["iou"] for score in found["classes"][:3]) / 3
    assert found["results"]["miou"] == pytest.approx(mean)
    assert [path.rsplit("/", 1)[1] for path in found["unreadable"]] == ["0002.png"]
    with file.with_suffix(".csv").open() as table:
        rows = list(csv.DictReader(table))
    assert [row["class"] for row in rows] == ["ground", "red", "green", "sky"]
    assert float(rows[1]["iou"]) == found["classes"][1]["iou"]
    assert rows[3]["iou"] == ""
    assert f"{100 * found['results']['miou']:.1f}" in capsys.readouterr().out
    after = load_trained(place / "run").backbone.state_dict()
    assert all(bool((after[name] == value).all()) for name, value in before.items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data.val=null"], r"give data\.train and data\.val"),
        (["size=2"], r"size=2: "),
        (
            ["size=320000000", *LINEAR[:2], "linear.batch_size=1"],
            r"^memory ran out .*: give batch_size=8, smaller images or",
        ),
        (["data.val=PLACE/train"], r"4 files are both in data\.train=.* and data\.val="),
        (["num_classes=2"], r"classes\.txt names 4 classes and num_classes=2"),
        (["linear.steps=3"], r"linear\.warmup_steps=1500 must be below linear\.steps=3"),
        (["data.max_bad_share=0", *LINEAR[1:], "linear.steps=6"], r"1 of 3 images can't be read"),
    ],
)
def test_a_mistake_is_one_sentence(place, arguments, message):
    arguments = [argument.replace("PLACE", str(place)) for argument in arguments]
    given = {argument.partition("=")[0] for argument in arguments}
    data = [f"data.train={place}/train", f"data.val={place}/val", "size=16"]
    kept = [argument for argument in data if argument.partition("=")[0] not in given]
    with pytest.raises(UserError, match=message):
        main([str(place / "run"), *kept, *arguments])


def test_names_of_classes_in_another_encoding_are_refused(place):
    names = place / "train/classes.txt"
    kept = names.read_bytes()
    names.write_bytes("ground\nrouge fonc\u00e9\ngreen\nsky\n".encode("latin-1"))
    try:
        with pytest.raises(UserError, match=r"classes\.txt is no text in UTF-8 \(byte 18 is 0xe9\)"):
            judged(place, *LINEAR)
    finally:
        names.write_bytes(kept)


def test_several_processes_are_refused(place, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"runs in one process, but the launcher started 2"):
        judged(place)
