"""Runs in this process whose backbone makes NaN in chosen steps."""

import json
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from config_observers import left_as_found
from full_disks import files_of_at_most
from torch import Tensor

from nestling.backbones import Features
from nestling.backbones.registry import _REGISTRY, register
from nestling.backbones.xcit import XCiT
from nestling.ssl import config as schema
from nestling.ssl.config import Config
from nestling.ssl.distillation import SelfDistillation
from nestling.ssl.errors import UserError
from nestling.ssl.pretraining import pretrain
from nestling.ssl.randomness import Stream, generator
from nestling.ssl.run import checkpoints
from nestling.ssl.run.loading import find_checkpoint, load_backbone
from nestling.ssl.run.log import read
from nestling.ssl.run.nonfinite import MOST_IN_A_ROW, tensors_in, watched

SEED = 3


class Poisoned(XCiT):
    """An XCiT whose images are NaN in chosen steps, which it knows by the seed that each step sets.

    The system then takes no file of more than `most_bytes`.
    """

    seeds: ClassVar[set[int]] = set()
    poisons: ClassVar[str] = "images"
    most_bytes: ClassVar[int | None] = None

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Features:
        is_bad = torch.initial_seed() in self.seeds
        if self.most_bytes is not None:
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.most_bytes if is_bad else hard, hard))
        if not is_bad:
            return super().forward(images, mask)
        if self.poisons == "images":
            return super().forward(images * torch.nan, mask)
        features = super().forward(images, mask)
        zero = features.cls.sum() * 0
        return Features(features.cls + zero.sqrt(), features.patches, features.grid)  # slope 1 / 0


def poison(*steps: int, what: str = "images") -> None:
    Poisoned.poisons = what
    Poisoned.seeds = {int(generator(SEED, Stream.NETWORK, step, 0).integers(2**62)) for step in steps}


@pytest.fixture(autouse=True)
def own_backbone() -> Iterator[None]:
    register({"poisoned": {}})(Poisoned)
    with left_as_found():
        yield
    _REGISTRY.pop("poisoned")
    Poisoned.most_bytes = None


def config(data: Path, out: Path, epochs: int = 2, **train: object) -> Config:
    """Three steps an epoch, a checkpoint after every step."""
    return Config(
        out=str(out),
        seed=SEED,
        data=schema.Data(train=str(data), num_workers=0, holdout=0),
        backbone=schema.Backbone(
            "poisoned", 0.1, options={"patch": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
        ),
        views=schema.Views(global_size=[16], num_local=2, local_size=[8]),
        head=schema.Head(num_prototypes=24, hidden_dim=16, bottleneck_dim=8, freeze_epochs=0),
        teacher=schema.Teacher(momentum=0.9),
        optim=schema.Optim(lr=1e-2, lr_scaling="none", warmup_epochs=1),
        train=schema.Train(
            epochs=epochs, batch_size=8, precision="fp32", checkpoint_every=0.3, keep_last=99, **train
        ),
        knn=schema.Knn(every=0),
        log=schema.Log(every=1, progress="none"),
    )


def report(run: Path) -> dict[str, object]:
    return json.loads((run / "nonfinite.json").read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize("what", ["images", "gradient"])
def test_a_step_that_is_not_finite_stops_the_run_before_it_is_applied(image_folder, tmp_path, what):
    poison(4, what=what)
    settings = config(image_folder(per_class=8, size=20), tmp_path / "run")
    with pytest.raises(
        UserError, match=r"step 5 has a loss or gradient that is not finite .*nonfinite\.json"
    ):
        pretrain(settings)
    assert [path.name for path in checkpoints.saved(tmp_path / "run")] == [
        f"step_{n:08d}" for n in range(1, 5)
    ]
    assert checkpoints.pointed(tmp_path / "run", checkpoints.LAST).name == "step_00000004"
    aside = find_checkpoint(tmp_path / "run" / "nonfinite")
    assert aside == tmp_path / "run" / "nonfinite" / "checkpoints" / "step_00000004"
    put, saved = checkpoints.load(aside), checkpoints.load(checkpoints.saved(tmp_path / "run")[-1])
    for name in checkpoints.TENSORS:
        pairs = getattr(put, name), getattr(saved, name)
        assert all(torch.equal(value, pairs[1][key]) for key, value in pairs[0].items()), name
    torch.testing.assert_close(put.optimizer["state"], saved.optimizer["state"], rtol=0, atol=0)
    assert put.trainer == saved.trainer
    load_backbone(aside)
    told = report(tmp_path / "run")
    assert (told["step"], told["epoch"]) == (5, pytest.approx(4 / 3))
    assert told["lr"] > 0
    assert told["temperature"] == settings.teacher.temperature
    (part,) = told["processes"]
    (forward,) = part["micro_batches"]
    assert len(forward["files"]) == 8
    assert all(Path(file).is_file() for file in forward["files"])
    if what == "images":
        assert part["first_module"].startswith("teacher.backbone.patch_embed"), part
        assert forward["loss"] == "nan"
    else:
        assert part["first_module"] is None
        assert isinstance(forward["loss"], float)
        assert part["gradients"][0].startswith("backbone.")


@pytest.mark.parametrize("mode", ["stop", "skip"])
def test_on_a_full_disk_what_the_report_would_say_is_said_and_a_run_that_skips_goes_on(
    image_folder, tmp_path, mode, capsys
):
    poison(1)
    Poisoned.most_bytes = 300
    settings = config(image_folder(per_class=8, size=20), tmp_path / "run", on_nan=mode)
    settings.train.checkpoint_every = 1
    blamed = r"first in the output of teacher\.backbone\.patch_embed\S* on process 0"
    with files_of_at_most(resource.RLIM_INFINITY):
        if mode == "stop":
            with pytest.raises(UserError, match=rf"step 2 has a loss .*{blamed}; \S+ could not be written"):
                pretrain(settings)
        else:
            pretrain(settings)
    said = capsys.readouterr().out.replace("\n", " ")
    assert re.search(r"nonfinite\.json can't be written: File too large", said)
    assert not list((tmp_path / "run").rglob("nonfinite.json"))
    assert not list((tmp_path / "run").rglob(".*"))
    if mode == "stop":
        assert re.search(r"nonfinite can't be written: File too large", said)
        assert checkpoints.newest(tmp_path / "run" / "nonfinite") is None
    else:
        assert re.search(rf"step 2 is not finite: {blamed}", said), said
        assert [record["step"] for record in read(tmp_path / "run" / "log.jsonl")] == list(range(7))


def test_the_report_names_the_images_of_the_step(image_folder, tmp_path, monkeypatch):
    shown: list[list[int]] = []
    from nestling.ssl.data.loader import TrainLoader

    following = TrainLoader.__next__

    def remember(self: TrainLoader) -> object:
        batch = following(self)
        shown.append(batch.indices.tolist())
        return batch

    monkeypatch.setattr(TrainLoader, "__next__", remember)
    poison(2)
    settings = config(image_folder(per_class=8, size=20), tmp_path / "run", accumulation=2)
    settings.train.batch_size = 4
    with pytest.raises(UserError):
        pretrain(settings)
    assert shown[4:6] == shown[6:8], "the two micro-batches of the third step, read again"
    files = [forward["files"] for forward in report(tmp_path / "run")["processes"][0]["micro_batches"]]
    assert [len(part) for part in files] == [4, 4]
    assert len({file for part in files for file in part}) == 8


@pytest.mark.parametrize("what", ["images", "gradient"])
def test_a_step_left_out_changes_no_weight_no_center_and_no_statistic(image_folder, tmp_path, what, capsys):
    poison(1, what=what)
    run = pretrain(config(image_folder(per_class=8, size=20), tmp_path / "run", on_nan="skip"))
    one, two, three, *rest = (checkpoints.load(path) for path in checkpoints.saved(run))
    assert len(rest) == 3
    for name in checkpoints.TENSORS:
        before, after, later = getattr(one, name), getattr(two, name), getattr(three, name)
        assert all(torch.equal(before[key], after[key]) for key in before), name
        assert not all(torch.equal(after[key], later[key]) for key in after), name
        assert all(value.isfinite().all() for value in later.values())
    assert one.optimizer["state"][0]["step"] == two.optimizer["state"][0]["step"]
    assert "warning: step 2 is left out" in capsys.readouterr().out
    assert report(run)["step"] == 2
    lines = (run / "log.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [record.get("skipped_steps") for record in records] == [None, 0, 1, 0, 0, 0, 0]
    assert (records[2]["loss"] is None) == (what == "images")
    assert records[3]["loss"] is not None


def test_a_run_that_leaves_nothing_out_is_the_same_with_skip(image_folder, tmp_path):
    poison()
    data = image_folder(per_class=8, size=20)
    runs = [pretrain(config(data, tmp_path / mode, on_nan=mode)) for mode in ("stop", "skip")]
    stop, skip = (checkpoints.load(checkpoints.saved(run)[-1]) for run in runs)
    for name in checkpoints.TENSORS:
        assert all(torch.equal(value, getattr(skip, name)[key]) for key, value in getattr(stop, name).items())
    assert not (runs[0] / "nonfinite.json").exists()


def test_too_many_in_a_row_stop_a_run_that_leaves_them_out(image_folder, tmp_path):
    poison(*range(1, 40))
    settings = config(image_folder(per_class=8, size=20), tmp_path / "run", epochs=5, on_nan="skip")
    with pytest.raises(UserError, match=rf"step {MOST_IN_A_ROW + 1} .*{MOST_IN_A_ROW} steps in a row"):
        pretrain(settings)
    assert read(tmp_path / "run" / "log.jsonl")[-1]["step"] == MOST_IN_A_ROW


def test_as_many_with_a_good_one_between_do_not(image_folder, tmp_path):
    poison(*(step for step in range(24) if step % 4))
    settings = config(image_folder(per_class=8, size=20), tmp_path / "run", epochs=8, on_nan="skip")
    assert sum(record.get("skipped_steps", 0) for record in read(pretrain(settings) / "log.jsonl")) == 18


def test_weights_that_a_step_made_infinite_are_never_saved(image_folder, tmp_path):
    settings = config(image_folder(per_class=8, size=20), tmp_path / "run", on_nan="skip")
    poison()
    settings.optim = schema.Optim(
        name="sgd", lr=3e38, lr_scaling="none", lr_end=3e38, clip_mode="none", warmup_epochs=0
    )
    with pytest.raises(UserError, match=r"weights are not finite after step \d+, so they are not saved"):
        pretrain(settings)
    for path in checkpoints.saved(tmp_path / "run"):
        assert all(value.isfinite().all() for value in checkpoints.load(path).student.values())


def test_a_last_layer_is_blamed_though_the_loss_computes_it(tmp_path):
    poison()
    method = SelfDistillation(config(tmp_path, tmp_path / "run"))
    with torch.no_grad(), watched(method) as found:
        method.student.head.last_layer.weight_v.fill_(torch.inf)
        views = torch.randn(4, 3, 16, 16)
        method.loss(method.student([views], 2), method.targets(views, 2), 0.04)
    assert found[:2] == ["student.head.last_layer", "student"]


def test_tensors_are_found_however_deep():
    deep = [
        {"a": torch.zeros(1)},
        (Features(torch.ones(1), torch.full((1,), 2.0), (1, 1)), torch.ones(1).long()),
    ]
    assert [float(tensor) for tensor in tensors_in(deep)] == [0, 1, 2]
