"""eval_knn as a user starts it: the table, the file, and mistakes in one sentence."""

import csv
import json
import random
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from nestling import backbones
from nestling.recipes.eval_knn import main
from nestling.ssl.command_line import write
from nestling.ssl.config import Backbone, Config, Data, Knn, Views
from nestling.ssl.data.sources.opening import open_source
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.online import OnlineKnn
from nestling.ssl.run.directory import writable
from nestling.ssl.run.loading import load_backbone

OPTIONS = {"embed_dim": 16, "depth": 1, "num_heads": 2}


@pytest.fixture
def run(tmp_path, image_folder):
    """A run directory with one checkpoint, and its images."""
    train = image_folder("train", classes=7, per_class=5)
    val = image_folder("val", classes=7, per_class=3, seed=1)
    for side in (train, val):  # one image in three of another class, or all would be right
        swapped = sorted(side.glob("*/*[14].png"))
        for image, content in zip(swapped, [file.read_bytes() for file in swapped[::-1]], strict=True):
            image.write_bytes(content)
    folder = tmp_path / "run/checkpoints/step_00000007"
    folder.mkdir(parents=True)
    for seed, network in enumerate(("teacher", "student")):
        torch.manual_seed(seed)
        state = backbones.create("xcit_nano_12_p4", **OPTIONS).state_dict()
        save_file(
            {f"backbone.{key}": value for key, value in state.items()}, folder / f"{network}.safetensors"
        )
    config = Config(
        data=Data(train=str(train), val=str(val), num_workers=0),
        backbone=Backbone("xcit_nano_12_p4", 0.1, OPTIONS),
        views=Views(global_size=[32]),
        knn=Knn(k=[5, 1], pooling=["cls", "mean_patch"], max_train=3),
    )
    write(config, folder / "config.yaml")
    return tmp_path / "run"


RESULTS = "results/knn_step_00000007_teacher.json"


def expected(checkpoint, network, **changes):
    """All training images vote, whatever the limit during pretraining."""
    backbone, config = load_backbone(checkpoint, network)
    config.knn.max_train = 100
    for name, value in changes.items():
        setattr(config.knn, name, value)
    train, val = open_source(config.data, "train"), open_source(config.data, "val")
    return OnlineKnn(train, val, config).judge(backbone, "cpu")


def judged(run, *arguments):
    """What the recipe writes under these settings."""
    out = run.parent / "out/knn.json"
    main([str(run), f"out={out}", *map(str, arguments)])
    return json.loads(out.read_text())


def rows_of(file):
    with file.open(newline="") as lines:
        return list(csv.reader(lines))


def test_a_run_directory_is_judged_and_the_results_written(run, capsys):
    main([str(run)])
    record = json.loads((run / RESULTS).read_text())
    assert record["results"] == expected(run / "checkpoints/step_00000007", "teacher")
    assert record["network"] == "teacher"
    assert (record["num_train"], record["num_val"], record["num_classes"]) == (35, 21, 7)
    assert record["settings"]["checkpoint"] == str(run)
    printed = capsys.readouterr().out
    assert "35 + 21 images, 32 numbers each: 4.48 kB of training features in memory" in printed
    accuracy = record["results"]["knn/cls/top1_k5"]
    for word in ("teacher of", "cls", "mean_patch", "top-1 %", "top-5 %", f"{100 * accuracy:.1f}"):
        assert word in printed
    assert record["files"] == [
        f"knn_step_00000007_teacher_{pooling}_{kind}.csv"
        for pooling in ("cls", "mean_patch")
        for kind in ("classes", "confusion")
    ]
    classes, confusion = (rows_of(run / "results" / file) for file in record["files"][:2])
    assert [row[:2] for row in classes[1:]] == [[f"class_{kind}", "3"] for kind in range(7)]
    assert sum(float(row[2]) for row in classes[1:]) / 7 == pytest.approx(accuracy)
    assert [sum(map(int, row[1:])) for row in confusion[1:]] == [3] * 7


def test_the_command_line_overrides_the_run(run):
    record = judged(run, "network=student", "knn.k=[2]", "knn.size=16", "knn.pooling=[cls]")
    checkpoint = run / "checkpoints/step_00000007"
    assert record["results"] == expected(checkpoint, "student", k=[2], size=16, pooling=["cls"])
    assert record["size"] == 16
    assert not (run / "results").exists()


def test_a_weights_file_is_judged_on_the_images_that_are_given(run):
    file = run / "checkpoints/step_00000007/teacher.safetensors"
    bare = file.with_name("bare.safetensors")
    tensors = {key.removeprefix("backbone."): value for key, value in load_file(file).items()}
    facts = {"backbone": {"name": "xcit_nano_12_p4", "options": OPTIONS}, "side": 32}
    save_file(tensors, bare, {"nestling": json.dumps(facts)})
    with pytest.raises(
        UserError, match=r"checkpoint=.*bare\.safetensors is a weights file.*: give data\.train"
    ):
        judged(bare)
    images = [f"data.{side}={run.parent / side}" for side in ("train", "val")]
    alike = ["knn.k=[5, 1]", "knn.pooling=[cls, mean_patch]", "data.num_workers=0"]
    assert judged(bare, *images, *alike)["results"] == expected(file.parent, "teacher")


def listed(file, images):
    """A list of images and their classes."""
    file.write_text("path,label\n" + "".join(f"{image},{image.parent.name}\n" for image in images))
    return file


def test_an_image_does_not_vote_on_itself_and_the_order_of_files_changes_nothing(run, capsys):
    images = sorted((run.parent / "train").rglob("*.png"))
    random.Random(0).shuffle(images)
    found = [
        judged(run, "knn.k=[4, 99]", f"data.train={train}", f"data.val={val}")
        for train, val in (
            (run.parent / "train", run.parent / "train"),
            (listed(run.parent / "shuffled.csv", images), run.parent / "train"),
        )
    ]
    assert found[0]["results"] == found[1]["results"]
    assert 0.2 < found[0]["results"]["knn/cls/top1_k4"] < 0.9
    assert [record["num_without_self"] for record in found] == [35] * 2
    assert "k=99 becomes k=34" in capsys.readouterr().out
    listed(run.parent / "twice.csv", [*images, images[0]])  # a list may name a file more than once
    both = judged(
        run, "knn.k=[99]", *(f"data.{side}={run.parent / 'twice.csv'}" for side in ("train", "val"))
    )
    assert (both["num_train"], both["num_without_self"]) == (36, 36)
    assert "knn/cls/top1_k34" in both["results"]  # both rows of the file are left out
    # With one image a class and its copy, only other classes can vote: a vote of one's own would be right.
    few = listed(run.parent / "few.csv", sorted((run.parent / "train").glob("*/0000.png")))
    alone = judged(run, "knn.k=[1]", f"data.train={few}", f"data.val={few}")
    assert set(alone["results"].values()) == {0}
    one = listed(run.parent / "one.csv", images[:1])
    with pytest.raises(UserError, match=r"one\.csv has no image but the one that is judged"):
        judged(run, f"data.train={one}", f"data.val={one}")


def test_classes_that_training_lacks_are_named_with_their_number_of_images(run, image_folder, capsys):
    val = image_folder("more", classes=["class_1", "eel", "owl"], per_class=2, seed=5)
    record = judged(run, f"data.val={val}")
    assert record["unknown_classes"] == {"eel": 2, "owl": 2}
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count("left out 4 of 6 validation images") == 1
    assert record["num_val"] == 2


def test_features_on_a_disk_and_approximate_indexes_judge_too_and_say_what_they_lose(run, capsys, tmp_path):
    exact, recalls = expected(run / "checkpoints/step_00000007", "teacher"), []
    for index, folder in (("flat", tmp_path / "scratch"), ("ivf", tmp_path / "scratch"), ("hnsw", "null")):
        record = judged(run, f"knn.index={index}", f"knn.features_dir={folder}")
        assert record["results"].keys() == exact.keys()
        assert all(abs(record["results"][name] - exact[name]) < 0.11 for name in exact)
        if index != "flat":
            assert record["recall"]["cls"]["recall_k5"] > 0.7
            recalls.append(f"{100 * record['recall']['cls']['recall_k5']:.1f}")
    printed = capsys.readouterr().out
    cells = [[cell.strip() for cell in line.split("│")] for line in printed.splitlines()]
    assert [row[-2] for row in cells if row[1:3] == ["cls", "5"]][1:] == recalls
    assert "2.24 kB of training features as float16 in" in printed
    assert "knn.index=hnsw misses neighbours and so biases the accuracy" in printed
    assert not [*(tmp_path / "scratch").iterdir()]


def test_few_shots_are_drawn_by_the_seed(run, capsys):
    few = ["knn.shots=[1, 5]", "knn.repeats=3", "knn.k=[1]", "knn.pooling=[cls]"]
    first, again, other = (judged(run, *few, f"knn.seed={seed}") for seed in (0, 0, 1))
    assert first["shots"] == again["shots"] != other["shots"]
    one, five = first["shots"]["cls"]["1"]["top1_k1"], first["shots"]["cls"]["5"]["top1_k1"]
    assert one["std"] > 0
    assert five == {"mean": first["results"]["knn/cls/top1_k1"], "std": 0}  # all there are
    assert re.search(rf"cls\W+1\W+1\W+{100 * one['mean']:.1f}", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN/nothing"], r"nothing: no such (file|folder)"),
        (["RUN/checkpoints"], r"holds no checkpoint"),
        ([], r"checkpoint"),
        (["RUN", "network=both"], r"network=both"),
        (["RUN", "knn.kk=3"], r"did you mean knn\.k"),
        (["RUN", "data.val=RUN/nowhere"], r"data\.val=.*nowhere: found nothing there"),
        (["RUN", "knn.size=2"], r"knn\.size=2"),
        (["RUN", "knn.pooling=[clss]"], r"clss is no read-out"),
        (["RUN", "knn.index=ivf", "knn.backend=torch"], r"knn\.index=ivf .* knn\.backend is torch"),
        (["RUN", "knn.features_dir=RUN/checkpoints/step_00000007/config.yaml"], r"features_dir=.* can't be"),
    ],
)
def test_a_mistake_is_one_sentence(run, arguments, message):
    with pytest.raises(UserError, match=message):
        main([argument.replace("RUN", str(run)) for argument in arguments])


@pytest.mark.slow
def test_three_processes_write_what_one_writes(run, repository, tmp_path):
    """Some of the judged images are training images, of one class fewer than there are processes."""
    shared = sorted((run.parent / "train").glob("class_[35]/*.png"))
    val = listed(tmp_path / "val.csv", [*shared, *(run.parent / "val").rglob("*.png")])
    settings = [f"data.val={val}", "knn.shots=[2]"]
    alone = judged(run, *settings)
    tables = [rows_of(tmp_path / "out" / file) for file in alone["files"]]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3"]
    script, out = str(repository / "recipes/eval_knn.py"), tmp_path / "three/knn.json"
    subprocess.run([*launcher, script, str(run), f"out={out}", *settings], check=True, timeout=300)
    several = json.loads(out.read_text())
    assert (alone["num_processes"], several["num_processes"]) == (1, 3)
    same = ("results", "shots", "num_train", "num_val", "num_without_self", "files")
    assert [several[name] for name in same] == [alone[name] for name in same]
    assert [rows_of(out.parent / file) for file in several["files"]] == tables


@pytest.mark.parametrize("place", ["", "file/knn.json"])
def test_results_that_cannot_be_written_are_refused_before_the_work(tmp_path, place):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match=r"out=.* can't be written: .*; name a file"):
        writable(tmp_path / place)
    assert (tmp_path / "file").read_text() == "mine"


def test_earlier_results_stay_until_new_ones_are_written(tmp_path):
    (tmp_path / "knn.json").write_text("{}")
    assert writable(tmp_path / "knn.json").read_text() == "{}"
    writable(tmp_path / "new" / "knn.json")
    assert not (tmp_path / "new" / "knn.json").exists()
