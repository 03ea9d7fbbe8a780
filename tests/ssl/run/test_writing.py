"""Checkpoints written by a thread: copies, one at a time, errors told, full disks, kills."""

import json
import random
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
import torch
from full_disks import SMALL_DISK, can_mount, files_of_at_most
from small_checkpoint import small_checkpoint

from nestling.ssl.errors import UserError
from nestling.ssl.run import checkpoints, writing
from nestling.ssl.run.writing import CheckpointWriter


def names(run):
    return [path.name for path in checkpoints.saved(run)]


def litter(run):
    return [path.name for path in run.rglob(".*")]


def test_what_training_does_next_does_not_reach_the_file(tmp_path):
    content = small_checkpoint(1, numbers=2_000_000)
    writer = CheckpointWriter(tmp_path, keep_last=2, on_full_disk="stop")
    writer.write(content)
    for tensors in (content.student, content.teacher, content.terms, content.optimizer["state"][0]):
        for tensor in tensors.values():
            tensor.fill_(-1)
    content.optimizer["param_groups"][0]["lr"] = 7
    content.trainer["best"] = 7
    writer.wait()
    saved = checkpoints.load(checkpoints.newest(tmp_path))
    assert saved.student["backbone.w"].unique().tolist() == [1]
    assert saved.teacher["backbone.w"].unique().tolist() == [2]
    assert saved.terms["dino.center.center"].tolist() == [0, 1, 2, 3]
    assert saved.optimizer["state"][0]["exp_avg"].unique().tolist() == [1]
    assert saved.optimizer["param_groups"][0]["lr"] == 0.1
    assert saved.trainer["best"] is None


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path):
    writer = CheckpointWriter(tmp_path, keep_last=1, on_full_disk="stop")
    writer.write(small_checkpoint(1, numbers=5_000_000))
    assert names(tmp_path) == [], "it is not there yet when the call returns"
    writer.write(small_checkpoint(2))
    assert "step_00000001" in names(tmp_path), "the second waited for the first"
    writer.wait()
    assert names(tmp_path) == ["step_00000002"]
    assert litter(tmp_path) == []


def test_random_numbers_and_threads_stay_as_they_are(tmp_path):
    def state():
        return (
            torch.get_rng_state().tolist(),
            random.getstate(),
            np.random.get_state()[1].tolist(),
            (torch.get_num_threads(), torch.get_num_interop_threads(), torch.is_grad_enabled()),
            [thread.name for thread in threading.enumerate()],
        )

    before = state()
    writer = CheckpointWriter(tmp_path, keep_last=1, on_full_disk="stop")
    writer.write(small_checkpoint(1))
    writer.wait()
    assert state() == before


def test_an_error_of_the_thread_is_raised_by_the_next_call(tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    for ending in (lambda writer: writer.wait(), lambda writer: writer.write(small_checkpoint(2))):
        writer = CheckpointWriter(tmp_path, keep_last=1, on_full_disk="wait")
        writer.write(small_checkpoint(1))
        with pytest.raises(
            UserError, match=r"step 1 can't be written to out=.*: (not a directory|file exists)"
        ):
            ending(writer)
        writer.wait()


def test_an_error_of_the_thread_can_be_asked_for_without_waiting(tmp_path):
    writer = CheckpointWriter(tmp_path, keep_last=1, on_full_disk="stop")
    writer.write(small_checkpoint(1))
    writer.check()
    writer.wait()
    with files_of_at_most(1000):
        writer.write(small_checkpoint(2, numbers=50_000))
        while writer._thread.is_alive():
            time.sleep(0.01)
        with pytest.raises(UserError, match="step 2 can't be written"):
            writer.check()


def test_a_run_that_fails_tells_the_error_of_its_checkpoint_without_raising(tmp_path, caplog):
    (tmp_path / "checkpoints").write_text("in the way")
    writer = CheckpointWriter(tmp_path, keep_last=1, on_full_disk="stop")
    writer.write(small_checkpoint(1))
    writer.give_up()
    assert "the checkpoint of step 1 can't be written" in caplog.text


def test_best_moves_once_the_checkpoint_is_whole_and_only_then_the_old_best_goes(tmp_path):
    writer = CheckpointWriter(tmp_path, keep_last=1, on_full_disk="stop")
    for step in (1, 2):
        writer.write(small_checkpoint(step))
        writer.point_best_at(step) if step == 1 else writer.wait()
    assert names(tmp_path) == ["step_00000001", "step_00000002"]
    writer.write(small_checkpoint(3, numbers=5_000_000))
    writer.point_best_at(3)
    assert checkpoints.pointed(tmp_path, checkpoints.BEST).name == "step_00000001", "it was not waited for"
    writer.wait()
    assert checkpoints.pointed(tmp_path, checkpoints.BEST).name == "step_00000003"
    assert names(tmp_path) == ["step_00000003"]
    (tmp_path / checkpoints.BEST).unlink()
    (tmp_path / checkpoints.BEST).mkdir()
    writer.point_best_at(3)
    with pytest.raises(
        UserError, match=r"the pointer to the best checkpoint can't be written to out=.*step_00000003"
    ):
        writer.wait()


def test_a_full_disk_leaves_the_last_good_one_and_says_what_it_takes(tmp_path):
    writer = CheckpointWriter(tmp_path, keep_last=1, on_full_disk="stop")
    writer.write(small_checkpoint(1))
    writer.point_best_at(1)
    writer.wait()
    for limit in (20, 300, 4000, 100_000, 250_000):  # within each kind of file
        with files_of_at_most(limit):
            writer.write(small_checkpoint(2, numbers=50_000))
            writer.point_best_at(2)
            with pytest.raises(
                UserError,
                match=r"step 2 can't be written .*: file too large \(it takes 800 kB, .* are free\); "
                r"step_00000001 is whole",
            ):
                writer.wait()
        assert litter(tmp_path) == []
        assert names(tmp_path) == ["step_00000001"]
        for pointer in (checkpoints.LAST, checkpoints.BEST):
            assert checkpoints.pointed(tmp_path, pointer).name == "step_00000001"
    assert checkpoints.load(checkpoints.newest(tmp_path)).trainer["step"] == 1


def test_a_full_disk_can_be_waited_for(tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.setattr(writing, "SECONDS_BETWEEN_TRIES", 0.02)
    writer = CheckpointWriter(tmp_path, keep_last=1, on_full_disk="wait")
    with files_of_at_most(1000):
        writer.write(small_checkpoint(1, numbers=50_000))
        time.sleep(0.3)
        assert names(tmp_path) == []
    writer.wait()
    assert names(tmp_path) == ["step_00000001"]
    waiting, going_on = (record.message for record in caplog.records)
    assert "file too large" in waiting
    assert "waits for room" in waiting
    assert going_on == "there is room again for the checkpoint of step 1"


def test_a_run_that_fails_does_not_wait_for_room(tmp_path, caplog):
    writer = CheckpointWriter(tmp_path, keep_last=1, on_full_disk="wait")
    with files_of_at_most(1000):
        writer.write(small_checkpoint(1, numbers=50_000))
        start = time.monotonic()
        writer.give_up()
    assert time.monotonic() - start < 2
    assert "none was saved before" in caplog.text


ON_SMALL_DISK = """
    import sys, threading, time
    from pathlib import Path
    from small_checkpoint import small_checkpoint
    from nestling.ssl.errors import UserError
    from nestling.ssl.run import checkpoints, writing

    run = Path(sys.argv[1])

    def tell():
        pointed = (checkpoints.pointed(run, name).name for name in ("last", "best"))
        print(checkpoints.newest(run).name, *pointed)

    stopping = writing.CheckpointWriter(run, 2, "stop")
    stopping.write(small_checkpoint(1, numbers=100_000))
    stopping.point_best_at(1)
    stopping.wait()
    filler = run / "filler"
    for free in (0, 1_000, 500_000, 1_606_000):  # the last: just too little for what is not a tensor
        taken = writing.disk.free_bytes(run) - free
        filler.write_bytes(bytes(taken))
        stopping.write(small_checkpoint(2, numbers=100_000))
        stopping.point_best_at(2)
        try:
            stopping.wait()
        except UserError as error:
            print(error)
        print(sorted(path.name for path in run.rglob("*") if path.name.startswith((".", "step_"))))
        tell()
        filler.unlink()
    writing.SECONDS_BETWEEN_TRIES = 0.05
    filler.write_bytes(bytes(writing.disk.free_bytes(run)))
    waiting = writing.CheckpointWriter(run, 2, "wait")
    waiting.write(small_checkpoint(2, numbers=100_000))
    time.sleep(0.3)
    filler.unlink()
    waiting.point_best_at(2)
    waiting.wait()
    tell()
"""


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="needs the right to mount a small disk")
def test_a_disk_that_is_really_full_leaves_the_last_good_one(tmp_path, repository):
    disk = tmp_path / "disk"
    disk.mkdir()
    script = tmp_path / "full.py"
    script.write_text(textwrap.dedent(ON_SMALL_DISK))
    ran = subprocess.run(
        [
            *SMALL_DISK,
            str(disk),
            "env",
            f"PYTHONPATH={repository / 'tests'}",
            sys.executable,
            str(script),
            str(disk),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    *full, after = ran.stdout.splitlines()
    assert len(full) == 12
    for sentence, left, pointed in zip(full[::3], full[1::3], full[2::3], strict=True):
        assert "step 2 can't be written to out=" in sentence
        assert "no space left on device (it takes 1.6 MB, " in sentence
        assert "step_00000001 is whole" in sentence
        assert left == "['step_00000001']"
        assert pointed == "step_00000001 step_00000001 step_00000001"
    assert after == "step_00000002 step_00000002 step_00000002"
    assert "waits for room" in ran.stderr


SAVED_IN_A_LOOP = """
    import os, signal, sys, time, random
    from pathlib import Path
    from small_checkpoint import small_checkpoint
    from nestling.ssl.run import checkpoints
    from nestling.ssl.run.writing import CheckpointWriter
    from nestling.ssl.run.checkpoints import weights_metadata

    run, draw = Path(sys.argv[1]), random.Random(0)
    weights_metadata(small_checkpoint(0).config)  # what the first call imports

    def save_for_ever(step, tell):
        checkpoints.clear_litter(run)
        print("litter", [path.name for path in run.rglob(".*")], flush=True)
        writer = CheckpointWriter(run, 2, "stop")
        while True:
            step += 1
            writer.write(small_checkpoint(step, numbers=3000, kept=step % 50 == 0))
            if step % 3 == 0:
                writer.point_best_at(step)
            writer.wait()
            os.write(tell, f"{step}\\n".encode())

    step = 0
    for life in range(300):
        if life >= 25 and step >= 20 and checkpoints.pointed(run, checkpoints.BEST):
            break
        heard, tell = os.pipe()
        child = os.fork()
        if child == 0:
            save_for_ever(step, tell)
        os.close(tell)
        with os.fdopen(heard) as pipe:
            time.sleep(draw.uniform(0.005, 0.2))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            told = [int(line) for line in pipe.read().split()]
        newest = checkpoints.newest(run)
        if newest is not None:
            content = checkpoints.load(newest)
            tensors = content.student["backbone.w"], content.optimizer["state"][0]["exp_avg"]
            values = {value for tensor in tensors for value in tensor.tolist()}
            assert values == {content.trainer["step"]} == {int(newest.name[5:])}, (newest, values)
            assert content.trainer["step"] in (max(told, default=step), max(told, default=step) + 1)
            step = content.trainer["step"]
        else:
            assert not told
        print("life", len(told), [path.name for path in run.rglob(".*")], flush=True)
    print("end", step)
"""


@pytest.mark.slow
def test_a_kill_at_any_instant_leaves_the_newest_complete_one_loadable(tmp_path, repository):
    script = tmp_path / "loop.py"
    script.write_text(textwrap.dedent(SAVED_IN_A_LOOP))
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(tmp_path / "run")],
        env={"PYTHONPATH": str(repository / "tests"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = ran.stdout.splitlines()
    lives = [line for line in lines if line.startswith("life")]
    starts = [line for line in lines if line.startswith("litter")]
    assert len(lives) >= 25
    assert sum("writing" in line for line in lives) >= 5, "it was hit while it saved"
    assert starts.count("litter []") == len(starts) > 20, "the next start clears what a kill left"
    assert int(lines[-1].split()[1]) >= 20
    for name in (checkpoints.LAST, checkpoints.BEST):
        assert checkpoints.pointed(tmp_path / "run", name) in checkpoints.saved(tmp_path / "run")
    for folder in checkpoints.saved(tmp_path / "run"):
        assert json.loads((folder / "trainer.json").read_text())["step"] == int(folder.name[5:])
