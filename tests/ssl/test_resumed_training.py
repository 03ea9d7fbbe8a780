"""Runs that go on in this process end as those left alone; the recipe's own tests start real processes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_runs import assert_same, config, trained

from nestling.ssl import training
from nestling.ssl.data.loader import Batch
from nestling.ssl.data.prefetch import Prefetched
from nestling.ssl.errors import UserError
from nestling.ssl.pretraining import pretrain
from nestling.ssl.run import checkpoints
from nestling.ssl.run.log import read

pytestmark = pytest.mark.usefixtures("own_backbones")


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


def test_a_finished_run_resumed_says_its_result_again_and_trains_nothing(image_folder, tmp_path):
    settings = config(image_folder(per_class=12, size=20), tmp_path / "run")
    first, first_log = trained(settings)
    settings.resume = "auto"
    again, again_log = trained(settings)
    assert first_log == again_log
    assert_same(first.teacher, again.teacher)


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
