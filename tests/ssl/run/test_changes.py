"""Runs that go on with another batch size, in this process; several processes in the recipe's own tests."""

import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from nestling.ssl import config as schema
from nestling.ssl.config import Config
from nestling.ssl.data.course import Course
from nestling.ssl.data.loader import TrainLoader
from nestling.ssl.data.order import epoch_order
from nestling.ssl.errors import Stopped, UserError
from nestling.ssl.pretraining import pretrain
from nestling.ssl.run import checkpoints
from nestling.ssl.run.changes import composition, continued, facts, refuse_foreign
from nestling.ssl.run.log import read


def config(data: Path, out: Path, batch_size: int, **train: object) -> Config:
    return Config(
        out=str(out),
        resume="auto",
        data=schema.Data(train=str(data), num_workers=0, holdout=0.25),
        backbone=schema.Backbone("xcit_nano_12_p4", options={"embed_dim": 16, "depth": 1, "num_heads": 2}),
        views=schema.Views(global_size=[16], num_local=1, local_size=[8]),
        head=schema.Head(num_prototypes=24, hidden_dim=16, bottleneck_dim=8),
        teacher=schema.Teacher(temperature_warmup_epochs=1),
        optim=schema.Optim(lr=1e-3, warmup_epochs=1),
        train=schema.Train(**{"epochs": 2, "batch_size": batch_size, "precision": "fp32", **train}),
        knn=schema.Knn(k=[3], size=16, crop_ratio=1.0),
        log=schema.Log(every=1, progress="none"),
    )


def stopped_after_a_step(settings: Config) -> None:
    settings.train.max_hours = 0
    with pytest.raises(Stopped):
        pretrain(settings)


def teacher(run: Path) -> dict[str, torch.Tensor]:
    newest = checkpoints.newest(run)
    assert newest is not None
    return checkpoints.load(newest).teacher


def test_a_run_stopped_in_mid_epoch_goes_on_with_other_batches(image_folder, tmp_path, monkeypatch, capsys):
    shown: dict[Path, list[int]] = {}
    following, run, copy = TrainLoader.__next__, tmp_path / "run", tmp_path / "copy"
    cut = tmp_path / "cut"

    def remember(self: TrainLoader) -> object:
        batch = following(self)
        shown.setdefault(out, []).extend(batch.indices.tolist())
        return batch

    monkeypatch.setattr(TrainLoader, "__next__", remember)
    data, out = image_folder(per_class=12, size=20), run
    stopped_after_a_step(config(data, run, 4))
    assert "goes on" not in capsys.readouterr().out.replace("resume=auto goes on", "")
    stopped_after_a_step(config(data, run, 3, accumulation=2))
    said = capsys.readouterr().out
    assert said.count("warning: the run in") == 1
    for fact in (
        "goes on after step 1 with another global batch: 6 = 3 images x 2 micro-batches x 1 process, it was "
        "4 = 4 images x 1 micro-batch x 1 process",
        "steps per epoch 6 -> 4, steps left 11 -> 7, peak learning rate 1.563e-05 -> 2.344e-05 "
        "(optim.lr_scaling=linear)",
    ):
        assert fact in said, said
    shutil.copytree(run, copy)
    shutil.copytree(run, cut)
    shown[copy], shown[cut] = list(shown[run]), list(shown[run])

    pretrain(config(data, run, 8))
    assert "global batch 8 = 8 images x 1 micro-batch x 1 process; steps: 3 per epoch, 7 in all" in (
        capsys.readouterr().out
    )
    orders = [epoch_order(27, 0, epoch).tolist() for epoch in range(2)]
    assert shown[run] == orders[0][: 4 + 6 + 8 + 8] + orders[1][: 3 * 8]
    records = read(run / "log.jsonl")
    assert [record["step"] for record in records] == list(range(8))
    assert [record["images_seen"] for record in records] == [0, 4, 10, 18, 26, 34, 42, 50]
    assert [record["epoch"] for record in records if "knn/cls/top1_k3" in record] == [0, 1, 2]
    assert checkpoints.load_trainer(checkpoints.saved(run)[-1])["images_seen"] == 50

    out = copy  # once more with a stop after the change, from where it goes on unchanged
    stopped_after_a_step(config(data, copy, 8))
    capsys.readouterr()
    pretrain(config(data, copy, 8))
    assert "warning: the run in" not in capsys.readouterr().out
    assert shown[copy] == shown[run]
    once, twice = teacher(run), teacher(copy)
    assert all(torch.equal(once[name], twice[name]) for name in once)

    out = cut  # by a batch that doesn't fit into the rest of its epoch
    pretrain(config(data, cut, 18, keep_every=1, keep_last=1))
    assert (
        "The last 17 images of this epoch are left out, as they fill no step; all" in capsys.readouterr().out
    )
    assert shown[cut] == orders[0][: 4 + 6] + orders[1][:18]
    records = read(cut / "log.jsonl")
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert [record["epoch"] for record in records if "knn/cls/top1_k3" in record] == [0, 1, 2]
    assert [path.name for path in checkpoints.saved(cut)] == ["step_00000002", "step_00000003"]
    assert (checkpoints.saved(cut)[0] / checkpoints.KEPT).exists(), "as the end of its epoch"

    with pytest.raises(UserError, match=r"began with train\.epochs=2, now it is 3: give the old value"):
        pretrain(config(data, copy, 8, epochs=3))
    (data / "class_0" / "0000.png").unlink()
    with pytest.raises(UserError, match="began with 27 training images, now there are 26: restore them"):
        pretrain(config(data, copy, 8))


def trainer(course: Course, step: int, settings: Config, num_processes: int) -> dict[str, int]:
    return {**asdict(course.at(step)), **facts(course, settings, num_processes)}


def test_the_same_global_batch_composed_otherwise_is_said_and_changes_no_step(tmp_path, caplog):
    course, settings = Course(23, 8, 2), config(tmp_path, tmp_path, 4)
    now = facts(course, settings, 2)
    settings.train.batch_size = 8
    after = continued(course, settings, now, trainer(course, 3, settings, 1))
    assert [after.at(step) for step in range(3, 5)] == [course.at(step) for step in range(3, 5)]
    (record,) = caplog.records
    said = record.getMessage()
    assert (
        "8 = 4 images x 1 micro-batch x 2 processes, it was 8 = 8 images x 1 micro-batch x 1 process" in said
    )
    assert "the steps left (1) see the same images" in said


def test_nothing_is_said_where_nothing_changed_or_nothing_is_left(tmp_path, caplog):
    course, settings = Course(23, 8, 2), config(tmp_path, tmp_path, 8)
    now = facts(course, settings, 1)
    continued(course, settings, now, trainer(course, 3, settings, 1))
    other = Course(23, 4, 2)
    finished = continued(course, settings, now, trainer(other, other.num_steps, settings, 1))
    assert finished.num_steps == other.num_steps, "a finished run stays finished"
    assert not caplog.records


def test_a_batch_that_leaves_the_last_epoch_without_a_step_is_refused_with_one_that_does_not(tmp_path):
    begun, settings = Course(36, 4, 1), config(tmp_path, tmp_path, 8, accumulation=2)
    before = trainer(begun, 5, config(tmp_path, tmp_path, 4), 1)  # 16 left
    with pytest.raises(UserError) as caught:
        continued(Course(36, 32, 1), settings, facts(Course(36, 32, 1), settings, 2), before)
    assert str(caught.value).endswith(
        "has 16 images left of its last epoch, too few for a step of the global batch 32 = 8 images x "
        "2 micro-batches x 2 processes: the largest that still fills one is 16 (train.batch_size=4)"
    )
    fits = Course(36, 16, 1)
    assert continued(fits, settings, facts(fits, settings, 2), before).num_steps == 6
    nearly = trainer(begun, 8, config(tmp_path, tmp_path, 4), 1)  # 4 left, which is less than a 1 x 3 x 2
    settings.train.accumulation, course = 3, Course(36, 6, 1)
    with pytest.raises(
        UserError, match=r"fills one is 4 \(with fewer processes or less train\.accumulation\)"
    ):
        continued(course, settings, facts(course, settings, 2), nearly)


def test_a_checkpoint_that_lacks_what_is_needed_is_refused_by_its_name(tmp_path):
    course, settings = Course(23, 8, 2), config(tmp_path, tmp_path, 8)
    known = facts(course, settings, 1)
    whole = {**trainer(course, 3, settings, 1), "best": None, "scaler": None}
    refuse_foreign(tmp_path / "step_3", whole, known)
    for name in whole:
        other = {key: value for key, value in whole.items() if key != name}
        with pytest.raises(UserError, match=rf"step_3 was written by another version .* lacks {name}: start"):
            refuse_foreign(tmp_path / "step_3", other, known)


def test_a_batch_is_told_by_what_multiplies_to_it(tmp_path):
    settings = config(tmp_path, tmp_path, 4, accumulation=3)
    assert (
        composition(facts(Course(99, 24, 2), settings, 2)) == "24 = 4 images x 3 micro-batches x 2 processes"
    )
