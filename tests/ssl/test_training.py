"""The loop in this process: equivalences, resume, judging. The recipe's own tests start real processes."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn

from nestling import backbones
from nestling.backbones import Backbone, Features
from nestling.backbones.registry import _REGISTRY, register
from nestling.ssl import config as schema
from nestling.ssl import training
from nestling.ssl.config import Config
from nestling.ssl.data.loader import Batch
from nestling.ssl.data.prefetch import Prefetched
from nestling.ssl.errors import UserError
from nestling.ssl.pretraining import pretrain
from nestling.ssl.run import checkpoints
from nestling.ssl.run.log import read

TIMES = ("images_per_second", "data_wait")


class TwoLayers(Backbone):
    """A backbone without batch norm, whose gradients do not depend on how a batch is split."""

    def __init__(self, name: str, drop_path: float = 0.0) -> None:
        super().__init__()
        self.name, self.embed_dim, self.stride, self.min_size = name, 12, 4, 4
        self.stem = nn.Conv2d(3, 12, 4, stride=4)
        self.mix = nn.Linear(12, 12)
        self.dropout = nn.Dropout(drop_path)

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Features:
        x = self.stem(images)
        tokens = self.dropout(self.mix(x.flatten(2).mT.tanh()))
        return Features(tokens.mean(dim=1), tokens, (x.shape[2], x.shape[3]))

    def pyramid(self, images: Tensor) -> list[Tensor]:
        raise ValueError("none")

    def attention(self, images: Tensor) -> Tensor:
        return self.forward(images).patches.mean(dim=-1)[:, None].unflatten(-1, self.forward(images).grid)


class Witness(TwoLayers):
    """The same, which remembers the shapes of all images that its student was shown."""

    shown: ClassVar[list[tuple[int, ...]]] = []

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Features:
        if self.training:  # the teacher and what is judged evaluate
            self.shown.append(tuple(images.shape))
        return super().forward(images, mask)


@pytest.fixture(autouse=True)
def own_backbones_and_fresh_accelerate() -> Iterator[None]:
    register({"two_layers": {}})(TwoLayers)
    register({"witness": {}})(Witness)
    Witness.shown.clear()
    yield
    _REGISTRY.pop("two_layers")
    _REGISTRY.pop("witness")
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state() if state is not AcceleratorState else state._reset_state(True)


def config(
    data: Path, out: Path, *, name: str = "two_layers", color_on: str = "auto", **train: object
) -> Config:
    tiny = {"embed_dim": 16, "depth": 1, "num_heads": 2} if name.startswith("xcit") else {}
    return Config(
        out=str(out),
        data=schema.Data(train=str(data), num_workers=0, holdout=0.25),
        backbone=schema.Backbone(name, 0.1, options=tiny),
        views=schema.Views(global_size=[16], num_local=2, local_size=[8], color_on=color_on),
        head=schema.Head(num_prototypes=24, hidden_dim=16, bottleneck_dim=8, freeze_epochs=1),
        teacher=schema.Teacher(temperature=0.07, temperature_warmup_epochs=2, momentum=0.9),
        optim=schema.Optim(lr=1e-2, lr_scaling="none", warmup_epochs=1),
        train=schema.Train(**{"epochs": 3, "batch_size": 8, "precision": "fp32", **train}),
        knn=schema.Knn(k=[3], size=16, crop_ratio=1.0),
        log=schema.Log(every=1, progress="none"),
    )


def trained(settings: Config) -> tuple[checkpoints.Checkpoint, list[dict[str, float]]]:
    run = pretrain(settings)
    records = [{k: v for k, v in r.items() if k not in TIMES} for r in read(run / "log.jsonl")]
    newest = checkpoints.newest(run)
    assert newest is not None
    return checkpoints.load(newest), records


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor], atol: float = 0.0) -> None:
    assert left.keys() == right.keys()
    for key in left:
        torch.testing.assert_close(left[key], right[key], rtol=0, atol=atol)


def test_the_same_config_gives_the_same_run_to_the_bit(image_folder, tmp_path):
    data = image_folder(per_class=12, size=20)
    first, first_log = trained(config(data, tmp_path / "a", name="xcit_nano_12_p4"))
    second, second_log = trained(config(data, tmp_path / "b", name="xcit_nano_12_p4"))
    assert_same(first.teacher, second.teacher)
    assert first_log == second_log


def test_a_short_run_gives_the_numbers_it_always_gave(image_folder, tmp_path):
    """The golden run: a refactor must not move it; a change of the algorithm records it anew."""
    data = image_folder(per_class=12, size=20)
    _, log = trained(config(data, tmp_path / "run", name="xcit_nano_12_p4"))
    losses = [0.55234, 1.26724, 0.02902, 0.02122, 0.03481, 0.09197, 0.24255, 0.40039, 0.63218]
    centers = [0.0, 0.17773, 0.26286, 0.41161, 0.55721, 0.68866, 0.80686, 0.9134, 1.00961]
    assert [record["loss"] for record in log[1:]] == pytest.approx(losses, abs=1e-3)
    assert [record["dino/center_norm"] for record in log[1:]] == pytest.approx(centers, abs=1e-3)


def test_accumulating_equals_one_large_batch(image_folder, tmp_path):
    data = image_folder(per_class=12, size=20)
    settings = config(data, tmp_path / "whole", batch_size=8)
    settings.backbone.drop_path = 0.0
    whole, whole_log = trained(settings)
    settings = config(data, tmp_path / "parts", batch_size=2, accumulation=4)
    settings.backbone.drop_path = 0.0
    parts, parts_log = trained(settings)
    for name in checkpoints.TENSORS:
        assert_same(getattr(whole, name), getattr(parts, name), atol=1e-5)
    for one, other in zip(whole_log, parts_log, strict=True):
        assert one.get("lr") == other.get("lr")
        assert one.get("momentum") == other.get("momentum")
        assert one.get("loss", 0) == pytest.approx(other.get("loss", 0), abs=1e-5)


def check_resumed(data: Path, root: Path, **settings: object) -> None:
    """A run that goes on from any of its checkpoints ends as the one left alone, its log included."""
    alone, alone_log = trained(config(data, root / "alone", keep_last=9, **settings))
    for stopped in checkpoints.saved(root / "alone")[:-1]:
        broken = root / f"broken_after_{stopped.name}"
        (broken / "checkpoints").mkdir(parents=True)
        stopped.rename(broken / "checkpoints" / stopped.name)
        for name_of_file in ("config.yaml", "environment.json"):
            (broken / name_of_file).write_text((root / "alone" / name_of_file).read_text())
        lines = (root / "alone" / "log.jsonl").read_text().splitlines(keepends=True)
        (broken / "log.jsonl").write_text("".join(lines[: len(lines) - 1]))  # one step beyond is lost
        going_on = config(data, broken, keep_last=9, **settings)
        going_on.resume = "auto"
        resumed, resumed_log = trained(going_on)
        for part in checkpoints.TENSORS:
            assert_same(getattr(alone, part), getattr(resumed, part))
        assert resumed_log == alone_log


@pytest.mark.parametrize("name", ["two_layers", "xcit_nano_12_p4"])
def test_a_run_resumed_at_any_epoch_equals_the_run_left_alone(image_folder, tmp_path, name):
    check_resumed(image_folder(per_class=12, size=20), tmp_path, name=name)


def test_a_run_resumed_within_an_epoch_replaces_and_counts_unreadable_images_alike(image_folder, tmp_path):
    data = image_folder(per_class=12, size=20)
    for number in (1, 5, 8):
        (data / "class_0" / f"{number:04d}.png").write_bytes(b"no image")
    check_resumed(data, tmp_path, checkpoint_every=0.34)
    assert any(record["replaced_images"] for record in read(tmp_path / "alone" / "log.jsonl")[1:])


class Copies:
    """A device beside the CPU that has its batches one ahead."""

    def begin(self, batch: Batch) -> Batch:
        self.copy = replace(batch, views=[view.clone() for view in batch.views])
        return replace(self.copy, views=[torch.zeros_like(view) for view in batch.views])

    def finish(self, batch: Batch) -> None:
        for ours, theirs in zip(batch.views, self.copy.views, strict=True):
            ours.copy_(theirs)

    def mark(self) -> None:
        pass

    def idle(self) -> float:
        return 0.0


def test_batches_fetched_ahead_with_colours_on_the_device_train_alike_and_resume_exactly(
    image_folder, tmp_path, monkeypatch
):
    """A batch that was fetched and not used doesn't count, unreadable images in it neither."""
    data = image_folder(per_class=12, size=20)
    for number in (1, 5, 8):
        (data / "class_0" / f"{number:04d}.png").write_bytes(b"no image")
    plain, plain_log = trained(config(data, tmp_path / "plain", epochs=2, color_on="device"))
    _, loaded_log = trained(config(data, tmp_path / "loaded", epochs=2, color_on="loader"))
    for one, other in zip(plain_log, loaded_log, strict=True):
        assert one.get("loss", 0) == pytest.approx(other.get("loss", 0), abs=0.02)
    monkeypatch.setattr(training, "prefetched", lambda batches, device: Prefetched(batches, Copies()))
    check_resumed(data, tmp_path, epochs=2, color_on="device")
    ahead = checkpoints.newest(tmp_path / "alone")
    assert ahead is not None
    assert_same(checkpoints.load(ahead).student, plain.student)


def test_judging_changes_nothing_that_training_does_next(image_folder, tmp_path):
    data = image_folder(per_class=12, size=20)
    settings = config(data, tmp_path / "judged", name="xcit_nano_12_p4")
    judged, _ = trained(settings)
    settings = config(data, tmp_path / "unjudged", name="xcit_nano_12_p4")
    settings.knn.every = 0
    unjudged, _ = trained(settings)
    for part in checkpoints.TENSORS:
        assert_same(getattr(judged, part), getattr(unjudged, part))


def test_the_last_layer_is_bit_identical_while_frozen_and_learns_after(image_folder, tmp_path):
    data = image_folder(per_class=12, size=20)
    settings = config(data, tmp_path / "run", epochs=2, keep_last=9)
    settings.optim.warmup_epochs = settings.teacher.temperature_warmup_epochs = 1
    pretrain(settings)
    torch.manual_seed(settings.seed)
    from nestling.ssl.distillation import SelfDistillation

    initial = SelfDistillation(settings).student.head.last_layer.weight_v
    frozen, free = (
        checkpoints.load(path).student["head.last_layer.weight_v"]
        for path in checkpoints.saved(tmp_path / "run")
    )
    assert torch.equal(frozen, initial)
    assert not torch.equal(free, initial)


def test_a_run_that_starts_from_weights_leaves_them_alone_while_its_head_warms_up(image_folder, tmp_path):
    settings = config(image_folder(per_class=12, size=20), tmp_path / "run", name="xcit_nano_12_p4", epochs=2)
    settings.optim.warmup_epochs = settings.teacher.temperature_warmup_epochs = 1
    settings.backbone.options["tokens_norm"] = True
    settings.backbone.freeze_epochs = 1
    settings.init_from = str(tmp_path / "weights.pth")
    torch.manual_seed(5)
    initial = backbones.create("xcit_nano_12_p4", **settings.backbone.options)
    torch.save(initial.state_dict(), settings.init_from)
    pretrain(settings)
    frozen, free = (checkpoints.load(path) for path in checkpoints.saved(tmp_path / "run"))
    for name, parameter in initial.named_parameters():
        for network in (frozen.student, frozen.teacher):
            assert torch.equal(network[f"backbone.{name}"], parameter), name
    assert not torch.equal(free.student["backbone.cls_token"], initial.cls_token)
    assert not torch.equal(frozen.student["head.mlp.0.weight"], free.student["head.mlp.0.weight"])
    assert [record["backbone_frozen"] for record in read(tmp_path / "run" / "log.jsonl")[1:]] == [
        True
    ] * 3 + [False] * 3


def test_a_run_that_started_from_weights_goes_on_without_their_file(image_folder, tmp_path):
    settings = config(
        image_folder(per_class=12, size=20), tmp_path / "run", name="xcit_nano_12_p4", keep_last=9
    )
    settings.backbone.options = {"tokens_norm": True}
    settings.init_from = str(tmp_path / "weights.pth")
    network = backbones.create("xcit_nano_12_p4", embed_dim=16, depth=1, num_heads=2)
    torch.save(network.state_dict(), settings.init_from)
    whole, _ = trained(settings)
    for checkpoint in checkpoints.saved(tmp_path / "run")[1:]:
        shutil.rmtree(checkpoint)
    Path(settings.init_from).unlink()
    settings.resume = "auto"
    resumed, _ = trained(settings)
    assert_same(whole.student, resumed.student)
    assert_same(whole.teacher, resumed.teacher)


def test_weights_that_do_not_fit_are_refused_before_an_old_run_is_deleted(image_folder, tmp_path):
    settings = config(image_folder(per_class=12, size=20), tmp_path / "run", name="xcit_nano_12_p4")
    settings.backbone.options["tokens_norm"] = True
    old = pretrain(settings) / "log.jsonl"
    text = old.read_text()
    settings.overwrite = True
    settings.init_from = str(tmp_path / "weights.pth")
    torch.save(
        backbones.create("xcit_nano_12_p4", embed_dim=32, depth=1, num_heads=2).state_dict(),
        settings.init_from,
    )
    with pytest.raises(UserError, match=r"init_from=.* do not fit xcit_nano_12_p4"):
        pretrain(settings)
    assert old.read_text() == text


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


def test_a_student_sees_every_size_of_a_list_and_one_size_at_a_time(image_folder, tmp_path):
    settings = config(image_folder(per_class=12, size=20), tmp_path / "run", name="witness", epochs=8)
    settings.views.global_size, settings.views.local_size = [12, 16, 20], [8, 12]
    _, records = trained(settings)
    steps = len(records) - 1
    tried = Witness.shown[:2]
    assert [shape[2:] for shape in tried] == [(12, 12), (8, 8)], "the smallest sizes, before the first step"
    large, small = Witness.shown[2::2], Witness.shown[3::2]
    assert len(large) == len(small) == steps
    assert set(large) == {(2 * 8, 3, side, side) for side in (12, 16, 20)}
    assert set(small) == {(2 * 8, 3, side, side) for side in (8, 12)}
    assert len(set(zip(large, small, strict=True))) > 3, "both are drawn on their own"


def test_lists_of_sizes_train_an_xcit(image_folder, tmp_path):
    settings = config(image_folder(per_class=12, size=20), tmp_path / "run", name="xcit_nano_12_p4")
    settings.views.global_size, settings.views.local_size = [12, 16, 20], [8, 12]
    checkpoint, records = trained(settings)
    assert all(isfinite(record["loss"]) for record in records[1:])
    assert all(value.isfinite().all() for value in checkpoint.student.values())


def test_a_run_without_labels_trains_without_knn(tmp_path, image_folder):
    flat = image_folder(classes=1, per_class=20, size=20) / "class_0"
    _, records = trained(config(flat, tmp_path / "run"))
    assert not any(name.startswith("knn/") for record in records for name in record)


def test_a_loss_that_is_not_finite_stops_the_run_and_saves_nothing(image_folder, tmp_path):
    settings = config(image_folder(per_class=12, size=20), tmp_path / "run")
    settings.optim.lr, settings.optim.clip_mode, settings.optim.name = 1e38, "none", "sgd"
    with pytest.raises(UserError, match="not finite"):
        pretrain(settings)
    assert checkpoints.saved(tmp_path / "run") == []


def test_a_finished_run_resumed_says_its_result_again_and_trains_nothing(image_folder, tmp_path):
    settings = config(image_folder(per_class=12, size=20), tmp_path / "run")
    first, first_log = trained(settings)
    settings.resume = "auto"
    again, again_log = trained(settings)
    assert first_log == again_log
    assert_same(first.teacher, again.teacher)


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


def test_a_changed_setting_is_refused_on_resume(image_folder, tmp_path):
    settings = config(image_folder(per_class=12, size=20), tmp_path / "run", epochs=1)
    settings.optim.warmup_epochs = settings.teacher.temperature_warmup_epochs = 0
    pretrain(settings)
    settings.resume, settings.teacher.momentum = "auto", 0.5
    with pytest.raises(UserError, match=r"teacher\.momentum=0\.9, now it is 0\.5"):
        pretrain(settings)


def test_a_run_remembers_where_its_images_lie(image_folder, tmp_path, monkeypatch):
    image_folder(name="mine", per_class=12, size=20)
    monkeypatch.chdir(tmp_path)
    run = pretrain(config(Path("mine"), tmp_path / "run", epochs=3))
    assert f"train: {tmp_path / 'mine'}" in (run / "config.yaml").read_text()


def test_a_rate_that_would_end_above_its_peak_is_said(image_folder, tmp_path, capsys):
    settings = config(image_folder(per_class=12, size=20), tmp_path / "run")
    settings.optim.lr, settings.optim.lr_end = 1e-6, 1e-5
    pretrain(settings)
    assert "ends above its peak 1.000e-06: lower optim.lr_end=1e-05" in capsys.readouterr().out
