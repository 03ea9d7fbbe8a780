"""eval_resolution as a user starts it: table, CSV, picture, results, and mistakes in one sentence."""

import csv
import json
import resource
import shutil
import subprocess
import sys

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from small_trained import write_trained

from nestling.recipes.eval_resolution import main
from nestling.ssl.data.sources.opening import open_source
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.online import OnlineKnn
from nestling.ssl.evaluation.resolution import judge as judging
from nestling.ssl.run import memory
from nestling.ssl.run.loading import load_backbone

QUICK = ["timing.batch_size=2", "timing.repeats=1"]
SIZES = "sizes=[16, 32, 24x40]"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_trained(tmp_path_factory.mktemp("xcit"))


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    return write_trained(tmp_path_factory.mktemp("vit"), "vit_tiny_p16")


def judged(run, out, *arguments):
    main([str(run), f"out={out}", *QUICK, *arguments])
    return json.loads(out.read_text())


def test_a_run_is_judged_at_every_size_and_all_is_written(run, capsys):
    main([str(run), SIZES, *QUICK])
    file = run / "results/resolution_step_00000007_teacher.json"
    record = json.loads(file.read_text())
    found = record["results"]["run"]
    assert list(found) == ["16", "32", "24x40"]
    assert list(found["32"]) == [
        "knn/cls/top1_k5",
        "linear/cls/top1",
        "images_per_second",
        "peak_memory_mb",
    ]
    backbone, config = load_backbone(run / "checkpoints/step_00000007", "teacher")
    pair = (open_source(config.data, "train"), open_source(config.data, "val"))
    assert (
        found["32"]["knn/cls/top1_k5"] == OnlineKnn(*pair, config).judge(backbone, "cpu")["knn/cls/top1_k5"]
    )
    assert record["machine"]["host"]
    assert record["networks"]["run"]["config"] == record["config"]
    assert (record["num_train"], record["num_val"], record["own_size"]) == (24, 16, {"run": 32})
    with file.with_suffix(".csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [(row["network"], row["height"], row["width"]) for row in rows] == [
        ("run", "16", "16"),
        ("run", "32", "32"),
        ("run", "24", "40"),
    ]
    assert float(rows[2]["linear/cls/top1"]) == found["24x40"]["linear/cls/top1"]
    with Image.open(file.with_suffix(".png")) as picture:
        assert picture.width > 800
    printed = capsys.readouterr().out
    for words in ("24 training images, 16 to judge", "24x40", f"{found['16']['images_per_second']:.4g}"):
        assert words in printed


def test_training_images_stay_at_their_size_or_take_the_test_size(run, tmp_path):
    own, test = (
        judged(run, tmp_path / f"{how}.json", "sizes=[12, 32]", f"train_size={how}")["results"]["run"]
        for how in ("own", "test")
    )
    assert own["32"]["knn/cls/top1_k5"] == test["32"]["knn/cls/top1_k5"]
    accuracies = [name for name in own["12"] if "top1" in name]
    assert [own["12"][name] for name in accuracies] != [test["12"][name] for name in accuracies]


def test_several_networks_are_compared_on_the_images_of_the_first(run, vit, tmp_path, capsys):
    other = vit.rename(vit.with_name("vit"))
    record = judged(run, tmp_path / "two.json", f"others={other}", "sizes=[32, 16x48]", "knn.k=[3]")
    assert list(record["results"]) == list(record["networks"]) == ["run", "vit"]
    assert record["networks"]["vit"]["backbone"] == "vit_tiny_p16"
    assert record["data"]["train"] == str(run.parent / "train")
    assert record["results"]["run"]["32"].keys() == record["results"]["vit"]["32"].keys()
    with pytest.raises(UserError, match=r"sizes: 24 can't be judged: vit_tiny_p16 takes .*multiples of 16"):
        judged(run, tmp_path / "three.json", f"others={other}", "sizes=[32, 24]")
    assert not (tmp_path / "three.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN", "sizes=[large]"], r"sizes: large is no size"),
        (["RUN", "sizes=[]"], r"sizes=\[\]"),
        (
            ["RUN", "sizes=16", "timing.batch_size=999999999"],
            r"^timing\.batch_size=999999999 images of 16 pixels",
        ),
        (["RUN", "sizes=2"], r"sizes: 2 can't be judged: .*4 x 4"),
        (["RUN", "others=RUN"], r"run is given twice"),
        (["RUN", "train_size=both"], r"train_size=both"),
        (["RUN/bare.safetensors"], r"is a weights file, which names no images: give data\.train"),
    ],
)
def test_a_mistake_is_one_sentence(run, arguments, message):
    with pytest.raises(UserError, match=message):
        main([argument.replace("RUN", str(run)) for argument in arguments])


def test_memory_that_runs_out_is_one_sentence(run):
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory.status("VmSize") + 4 * 2**30, hard))
    try:
        with pytest.raises(UserError, match=r"^memory ran out.*: give knn\.batch_size=64, smaller images or"):
            main([str(run), "sizes=99992"])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_features_that_are_not_finite_are_named_by_their_images(run, tmp_path):
    broken = tmp_path / "run"
    shutil.copytree(run, broken)
    file = broken / "checkpoints/step_00000007/teacher.safetensors"
    tensors = load_file(file)
    tensors["backbone.norm.weight"].fill_(torch.nan)
    save_file(tensors, file)
    with pytest.raises(
        UserError, match=r"cls of 24 images \(.*class_0/0000\.png, .*\) of data\.train is not fin"
    ):
        judged(broken, tmp_path / "broken.json", "sizes=16")


def test_more_training_images_than_memory_holds_are_refused_before_the_work(run, tmp_path, monkeypatch):
    monkeypatch.setattr(judging, "memory", lambda: 10_000)
    with pytest.raises(
        UserError, match=r"16 numbers of each of 24 images take 0\.0 GB .*: give fewer images in"
    ):
        judged(run, tmp_path / "small.json", "sizes=16")


def test_images_without_labels_are_refused(run, image_folder):
    plain = image_folder("plain", classes=1)
    with pytest.raises(
        UserError, match=r"accuracy needs labels and data\.train=.*plain has none to hold out"
    ):
        main([str(run / "bare.safetensors"), f"data.train={plain}", "sizes=32", "data.num_workers=0"])


@pytest.mark.slow
def test_two_processes_write_what_one_writes(run, repository, tmp_path):
    one = judged(run, tmp_path / "one.json", SIZES)["results"]["run"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    script, out = str(repository / "recipes/eval_resolution.py"), tmp_path / "two.json"
    subprocess.run([*launcher, script, str(run), f"out={out}", SIZES, *QUICK], check=True, timeout=300)
    two = json.loads(out.read_text())["results"]["run"]
    for size, measures in one.items():
        shares = {name: value for name, value in measures.items() if "top1" in name}
        assert {name: two[size][name] for name in shares} == shares
