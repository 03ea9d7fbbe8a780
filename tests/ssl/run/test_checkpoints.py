import json

import pytest
import torch
from safetensors import safe_open
from small_checkpoint import small_checkpoint

from nestling.ssl.errors import UserError
from nestling.ssl.run import checkpoints


def steps(run) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in checkpoints.saved(run)]


def test_a_checkpoint_comes_back_as_it_went(tmp_path):
    original = small_checkpoint(7)
    loaded = checkpoints.load(checkpoints.save(original, tmp_path, keep_last=2, is_best=False))
    for name in checkpoints.TENSORS:
        assert all(
            torch.equal(value, getattr(loaded, name)[key]) for key, value in getattr(original, name).items()
        )
    assert torch.equal(loaded.optimizer["state"][0]["exp_avg"], torch.full((6,), 7.0))
    assert loaded.trainer == original.trainer
    assert loaded.config == original.config


def test_weights_say_how_to_build_their_backbone_and_may_be_read_by_whoever_may_read_the_rest(tmp_path):
    saved = checkpoints.save(small_checkpoint(7), tmp_path, keep_last=2, is_best=False)
    for network in ("student", "teacher"):
        with safe_open(saved / f"{network}.safetensors", framework="pt") as file:
            described = json.loads(file.metadata()["nestling"])
        assert described == {"backbone": {"name": "xcit_nano_12_p4", "options": {"depth": 2}}}
    assert len({path.stat().st_mode for path in saved.iterdir()}) == 1


def test_old_checkpoints_go_by_number_and_the_best_stays(tmp_path):
    for step in (9, 10, 100, 1000):
        checkpoints.save(small_checkpoint(step), tmp_path, keep_last=2, is_best=step == 9)
    assert steps(tmp_path) == [9, 100, 1000]
    assert checkpoints.pointed(tmp_path, checkpoints.BEST).name == "step_00000009"
    assert checkpoints.pointed(tmp_path, checkpoints.LAST).name == "step_00001000"


def test_those_kept_for_good_stay_beside_the_last_and_the_best(tmp_path):
    for step in range(1, 10):
        kept = small_checkpoint(step, kept=step % 3 == 0)
        checkpoints.save(kept, tmp_path, keep_last=1, is_best=step == 4)
    assert steps(tmp_path) == [3, 4, 6, 9]


def test_a_write_that_was_cut_short_is_no_checkpoint_and_is_cleaned_up(tmp_path):
    checkpoints.save(small_checkpoint(1), tmp_path, keep_last=2, is_best=False)
    litter = tmp_path / "checkpoints" / ".step_00000002.writing"
    litter.mkdir()
    (litter / "student.safetensors").write_bytes(b"half")
    assert checkpoints.newest(tmp_path).name == "step_00000001"
    checkpoints.save(small_checkpoint(3), tmp_path, keep_last=2, is_best=False)
    assert not litter.exists()
    assert steps(tmp_path) == [1, 3]


def test_a_deletion_that_was_cut_short_is_ended_by_the_next_checkpoint(tmp_path):
    checkpoints.save(small_checkpoint(1), tmp_path, keep_last=2, is_best=False)
    half = tmp_path / "checkpoints" / ".step_00000000.deleting"
    half.mkdir()
    (half / "student.safetensors").write_bytes(b"half")
    (tmp_path / ".last.writing").write_text("checkpoi")
    checkpoints.save(small_checkpoint(2), tmp_path, keep_last=2, is_best=False)
    assert not list(tmp_path.rglob(".*"))


def test_a_kill_between_rename_and_pointer_loses_nothing(tmp_path):
    checkpoints.save(small_checkpoint(1), tmp_path, keep_last=2, is_best=False)
    checkpoints.save(small_checkpoint(2), tmp_path, keep_last=2, is_best=False)
    checkpoints.point(tmp_path, checkpoints.LAST, tmp_path / "checkpoints" / "step_00000001")
    assert checkpoints.newest(tmp_path).name == "step_00000002"


def test_the_optimizer_loads_with_weights_only(tmp_path):
    path = checkpoints.save(small_checkpoint(1), tmp_path, keep_last=1, is_best=False)
    assert torch.load(path / "optimizer.pt", weights_only=True)["param_groups"][0]["lr"] == 0.1


def test_an_incomplete_checkpoint_is_named_with_what_is_missing(tmp_path):
    path = checkpoints.save(small_checkpoint(1), tmp_path, keep_last=1, is_best=False)
    (path / "optimizer.pt").unlink()
    with pytest.raises(UserError, match=r"step_00000001.*optimizer\.pt"):
        checkpoints.load(path)


def test_a_damaged_checkpoint_is_named(tmp_path):
    path = checkpoints.save(small_checkpoint(1), tmp_path, keep_last=1, is_best=False)
    for name in ("student.safetensors", "optimizer.pt", "trainer.json"):
        whole = (path / name).read_bytes()
        (path / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(UserError, match=r"step_00000001 is damaged"):
            checkpoints.load(path)
        (path / name).write_bytes(whole)


def test_folders_of_ones_own_beside_the_checkpoints_are_left_alone(tmp_path):
    checkpoints.save(small_checkpoint(1), tmp_path, keep_last=1, is_best=False)
    (tmp_path / "checkpoints" / "step_00000001_backup").mkdir()
    checkpoints.save(small_checkpoint(2), tmp_path, keep_last=1, is_best=False)
    assert steps(tmp_path) == [2]
    assert (tmp_path / "checkpoints" / "step_00000001_backup").is_dir()
