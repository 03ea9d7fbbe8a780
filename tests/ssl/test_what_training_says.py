"""What a run logs, and what it warns of: collapse of both kinds, rates that end above their peak."""

import json

import pytest
from small_runs import config

from nestling.ssl.config import Config
from nestling.ssl.pretraining import pretrain

pytestmark = pytest.mark.usefixtures("own_backbones")


def test_every_monitor_is_logged_as_strict_json(image_folder, tmp_path):
    run = pretrain(config(image_folder(per_class=12, size=20), tmp_path / "run"))
    lines = (run / "log.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [record["step"] for record in records] == list(range(len(records)))
    assert set(records[1]) >= {
        *("step", "epoch", "loss", "dino/teacher_entropy", "dino/kl", "dino/dominant_prototype"),
        *(
            "dino/center_norm",
            "feature_std",
            "gradient_norm",
            "lr",
            "weight_decay",
            "momentum",
            "temperature",
        ),
        *("images_per_second", "data_wait"),
    }
    assert 0 <= records[1]["data_wait"] <= 1
    judged = [record["epoch"] for record in records if "knn/cls/top1_k3" in record]
    assert judged == [0, 1, 2, 3]


def collapsing(image_folder, tmp_path) -> Config:
    settings = config(image_folder(per_class=12, size=20), tmp_path / "run", epochs=120, checkpoint_every=120)
    settings.knn.every, settings.log.every = 0, 20
    return settings


@pytest.mark.slow
def test_targets_made_uniform_are_warned_of_while_they_train(image_folder, tmp_path, capsys):
    settings = collapsing(image_folder, tmp_path)
    settings.teacher.temperature = settings.teacher.temperature_start = 5.0
    pretrain(settings)
    said = capsys.readouterr().out
    assert said.count("warning: the teacher's targets have been uniform") == 1
    assert "one prototype" not in said


@pytest.mark.slow
def test_a_run_without_centering_is_warned_of_its_one_prototype(image_folder, tmp_path, capsys):
    settings = collapsing(image_folder, tmp_path)
    settings.teacher.center_momentum = 1.0
    pretrain(settings)
    said = capsys.readouterr().out
    assert said.count("warning: one prototype has won") == 1
    assert "uniform" not in said


@pytest.mark.slow
def test_a_healthy_run_of_that_length_stays_silent(image_folder, tmp_path, capsys):
    pretrain(collapsing(image_folder, tmp_path))
    assert "warning" not in capsys.readouterr().out


def test_a_rate_that_would_end_above_its_peak_is_said(image_folder, tmp_path, capsys):
    settings = config(image_folder(per_class=12, size=20), tmp_path / "run")
    settings.optim.lr, settings.optim.lr_end = 1e-6, 1e-5
    pretrain(settings)
    assert "ends above its peak 1.000e-06: lower optim.lr_end=1e-05" in capsys.readouterr().out
