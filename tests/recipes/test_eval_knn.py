"""eval_knn as a user starts it: the table, the file, and mistakes in one sentence."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

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


def expected(checkpoint, network, **changes):
    """All training images vote, whatever the limit during pretraining."""
    backbone, config = load_backbone(checkpoint, network)
    config.knn.max_train = 100
    for name, value in changes.items():
        setattr(config.knn, name, value)
    train, val = open_source(config.data, "train"), open_source(config.data, "val")
    return OnlineKnn(train, val, config).judge(backbone, "cpu")


def test_a_run_directory_is_judged_and_the_results_written(run, capsys):
    main([str(run)])
    checkpoint = run / "checkpoints/step_00000007"
    record = json.loads((checkpoint / "knn.json").read_text())
    assert record["results"] == expected(checkpoint, "teacher")
    assert record["network"] == "teacher"
    assert (record["num_train"], record["num_val"], record["num_classes"]) == (35, 21, 7)
    printed = capsys.readouterr().out
    assert "teacher of" in printed
    for word in (
        "cls",
        "mean_patch",
        "top-1 %",
        "top-5 %",
        f"{100 * record['results']['knn/cls/top1_k5']:.1f}",
    ):
        assert word in printed


def test_the_command_line_overrides_the_run(run, tmp_path):
    checkpoint = run / "checkpoints/step_00000007"
    out = tmp_path / "new/results.json"
    main([str(checkpoint), "network=student", "knn.k=[2]", "knn.size=16", "knn.pooling=[cls]", f"out={out}"])
    record = json.loads(out.read_text())
    assert record["results"] == expected(checkpoint, "student", k=[2], size=16, pooling=["cls"])
    assert record["size"] == 16
    assert not (checkpoint / "knn.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN/nothing"], r"nothing: no such folder"),
        (["RUN/checkpoints"], r"holds no checkpoint"),
        ([], r"checkpoint"),
        (["RUN", "network=both"], r"network=both"),
        (["RUN", "knn.kk=3"], r"did you mean knn\.k"),
        (["RUN", "data.val=RUN/nowhere"], r"data\.val=.*nowhere: found nothing there"),
        (["RUN", "data.val=RUN/../train"], r"are both in data\.train"),
        (["RUN", "knn.size=2"], r"knn\.size=2"),
    ],
)
def test_a_mistake_is_one_sentence(run, arguments, message):
    with pytest.raises(UserError, match=message):
        main([argument.replace("RUN", str(run)) for argument in arguments])


@pytest.mark.slow
def test_two_processes_write_what_one_writes(run, repository):
    main([str(run)])
    written = run / "checkpoints/step_00000007/knn.json"
    alone = json.loads(written.read_text())
    written.unlink()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    subprocess.run([*launcher, str(repository / "recipes/eval_knn.py"), str(run)], check=True, timeout=300)
    assert json.loads(written.read_text())["results"] == alone["results"]


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
