"""The loop in this process: equivalences, sizes, judging. The recipe's own tests start real processes."""

from math import isfinite

import pytest
import torch
from small_runs import Witness, assert_same, config, trained

from nestling.ssl.distillation import SelfDistillation
from nestling.ssl.errors import UserError
from nestling.ssl.pretraining import pretrain
from nestling.ssl.run import checkpoints

pytestmark = pytest.mark.usefixtures("own_backbones")


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
    losses = [0.56047, 1.27014, 0.02864, 0.0211, 0.03474, 0.09206, 0.24304, 0.4012, 0.63324]
    centers = [0.0, 0.17773, 0.2628, 0.41151, 0.55705, 0.68846, 0.80663, 0.91316, 1.00935]
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
    initial = SelfDistillation(settings).student.head.last_layer.weight_v
    frozen, free = (
        checkpoints.load(path).student["head.last_layer.weight_v"]
        for path in checkpoints.saved(tmp_path / "run")
    )
    assert torch.equal(frozen, initial)
    assert not torch.equal(free, initial)


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
