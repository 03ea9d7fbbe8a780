"""`train.batch_size=auto` from the command line into the run directory, in this process."""

import fcntl
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from config_observers import left_as_found
from image_folder import write_image_folder

from nestling.ssl import config as schema
from nestling.ssl import training
from nestling.ssl.batch_size import DryStep, with_batch_size
from nestling.ssl.command_line import read, write
from nestling.ssl.config import AUTO, Config
from nestling.ssl.errors import UserError
from nestling.ssl.pretraining import pretrain
from nestling.ssl.run import lock, processes
from nestling.ssl.run.log import read as read_log
from nestling.ssl.views.on_device import colored

TIMES = ("images_per_second", "data_wait")


def config(root: Path, out: str, batch_size: int, **train: int) -> Config:
    return Config(
        out=str(root / out),
        data=schema.Data(train=str(root / "images"), num_workers=0, holdout=0),
        backbone=schema.Backbone("xcit_nano_12_p4", 0.1, {"embed_dim": 16, "depth": 1, "num_heads": 2}),
        views=schema.Views(global_size=[16, 20], num_local=2, local_size=[8]),
        head=schema.Head(num_prototypes=24, hidden_dim=16, bottleneck_dim=8),
        optim=schema.Optim(warmup_epochs=1),
        train=schema.Train(epochs=2, batch_size=batch_size, precision="fp32", **train),
        log=schema.Log(progress="none"),
    )


def logged(run: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in record.items() if k not in TIMES} for record in read_log(run / "log.jsonl")]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_image_folder(tmp_path / "images", classes=2, per_class=25, size=20)
    return tmp_path


@pytest.mark.slow
def test_auto_trains_as_its_number_does_and_a_run_that_goes_on_keeps_it(root, capsys):
    with left_as_found():
        run = pretrain(config(root, "auto", AUTO, accumulation=2))
    said = capsys.readouterr().out
    assert "train.batch_size=auto: 24, the most that fill a step" in said, "of 50 images, a multiple of 8"
    assert read(Config, [], program="", default=run / "config.yaml").train.batch_size == 24
    with left_as_found():
        alike = pretrain(config(root, "given", 24, accumulation=2))
    assert logged(run) == logged(alike), "trying leaves no trace, random numbers included"
    pictures = sorted(path for path in (root / "images").rglob("*") if path.is_file())
    pictures[0].unlink()
    capsys.readouterr()
    with left_as_found(), pytest.raises(UserError, match="50 training images, now there are 49"):
        pretrain(replace(config(root, "auto", AUTO, accumulation=2), resume="auto"))
    assert "train.batch_size=auto: 24, as this run has it already" in capsys.readouterr().out


def test_a_step_is_tried_with_the_colours_that_the_device_will_do(root, monkeypatch):
    settings = config(root, "tried", 2)
    settings.views.color_on = "device"
    done: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        training, "colored", lambda views, colors: done.append(views.shape) or colored(views, colors)
    )
    with left_as_found():
        DryStep(settings, processes.start(settings))(2)
    assert done == [(4, 3, 20, 20), (4, 3, 8, 8)] * 2
    assert not (root / "tried").exists()


def test_too_few_images_are_refused_before_anything_is_tried(root):
    settings = config(root, "auto", AUTO, accumulation=51)
    with left_as_found(), pytest.raises(UserError, match="50 training images don't fill one step"):
        pretrain(settings)


def test_a_run_that_another_start_holds_is_refused_before_anything_is_tried(root, monkeypatch):
    (root / "auto").mkdir()
    monkeypatch.setattr("nestling.ssl.batch_size.DryStep", None)
    with (root / "auto" / lock.FILE).open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with left_as_found(), pytest.raises(UserError, match=r"out=.*auto is held by a process"):
            pretrain(config(root, "auto", AUTO))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_a_number_is_found_and_the_memory_given_back(root):
    settings = config(root, "auto", AUTO)
    settings.views.global_size = [224]
    with left_as_found():
        accelerator = processes.start(settings)
        before = torch.cuda.memory_reserved()
        found = with_batch_size(settings, accelerator, 10**6).train.batch_size
        assert found > 64
        assert found % 8 == 0
        assert torch.cuda.memory_reserved() == before


def test_auto_is_read_written_and_refused_by_name(tmp_path):
    settings = read(Config, ["train.batch_size=auto"], program="")
    assert settings.train.batch_size == AUTO
    write(settings, tmp_path / "config.yaml")
    assert "batch_size: auto" in (tmp_path / "config.yaml").read_text()
    assert read(Config, [], program="", default=tmp_path / "config.yaml") == settings
    legal = "is not a whole number of at least 1, or auto"
    for wrong, hint in {"0": "", "Auto": "; write auto", "all": "", "2.5": ""}.items():
        with pytest.raises(UserError, match=rf"train.batch_size={wrong} {legal}{hint}$"):
            read(Config, [f"train.batch_size={wrong}"], program="")
    with pytest.raises(UserError, match=r"train.epochs=auto is not a whole number of at least 1$"):
        read(Config, ["train.epochs=auto"], program="")
