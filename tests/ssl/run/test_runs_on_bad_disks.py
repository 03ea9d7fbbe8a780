"""Whole runs whose checkpoints are damaged or find no room."""

import re
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from config_observers import run as pretrained
from full_disks import SMALL_DISK, can_mount, files_of_at_most
from image_folder import write_image_folder
from small_checkpoint import small_run as config

from nestling.ssl import config as schema
from nestling.ssl.errors import UserError
from nestling.ssl.run import checkpoints, writing
from nestling.ssl.run.log import read


def test_every_nth_epoch_is_kept_for_good_and_so_it_is_after_a_restart(tmp_path):
    write_image_folder(tmp_path / "images", classes=2, per_class=8, size=20)
    settings = config(tmp_path / "run", epochs=5, keep_last=1, keep_every=2)

    def saved():
        return [path.name for path in checkpoints.saved(tmp_path / "run")]

    pretrained(settings)
    assert saved() == ["step_00000006", "step_00000012", "step_00000015"]
    for name in saved()[1:]:
        shutil.rmtree(tmp_path / "run/checkpoints" / name)
    settings.resume = "auto"
    pretrained(settings)
    assert saved() == ["step_00000006", "step_00000012", "step_00000015"]


def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before_to_the_same_end(
    tmp_path, capsys
):
    write_image_folder(tmp_path / "images", classes=2, per_class=8, size=20)
    settings, out = config(tmp_path / "run"), tmp_path / "run"
    pretrained(settings)
    whole = checkpoints.load(checkpoints.newest(out))
    first, second, third, fourth = checkpoints.saved(out)
    (fourth / "optimizer.pt").write_bytes((fourth / "optimizer.pt").read_bytes()[:-100])
    (third / "teacher.safetensors").unlink()
    (out / ".best.writing").write_text("")
    settings.resume = "auto"
    said = pretrained(settings)
    assert "step_00000012 is damaged and passed over: optimizer.pt has" in said
    assert "step_00000009 is damaged and passed over: teacher.safetensors is missing" in said
    assert re.search("resuming from .*step_00000006 after step 6", said)
    assert checkpoints.saved(out) == [first, second, third, fourth]
    assert not list(out.rglob(".*"))
    resumed = checkpoints.load(fourth)
    for name in checkpoints.TENSORS:
        left, right = getattr(whole, name), getattr(resumed, name)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left)
    assert all(
        torch.equal(value, resumed.optimizer["state"][index][key])
        for index, state in whole.optimizer["state"].items()
        for key, value in state.items()
    )


def test_a_run_without_a_sound_checkpoint_is_refused_in_one_sentence(tmp_path):
    write_image_folder(tmp_path / "images", classes=2, per_class=8, size=20)
    settings = config(tmp_path / "run", epochs=2)
    pretrained(settings)
    for folder in checkpoints.saved(tmp_path / "run"):
        (folder / "student.safetensors").write_bytes(b"")
    settings.resume = "auto"
    with pytest.raises(UserError, match=r"none of the 2 checkpoints in .* is whole"):
        pretrained(settings)


def test_a_full_disk_ends_a_run_in_one_sentence_and_it_goes_on_when_there_is_room(tmp_path):
    write_image_folder(tmp_path / "images", classes=2, per_class=8, size=20)
    alone, settings = config(tmp_path / "alone", epochs=2), config(tmp_path / "run", epochs=2)
    pretrained(alone)
    with files_of_at_most(20_000), pytest.raises(UserError) as caught:
        pretrained(settings)
    assert re.search(r"step 3 can't be written to out=.*: file too large \(it takes", str(caught.value))
    assert str(caught.value).endswith("Make room, then go on with resume=auto")
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
    settings.resume = "auto"
    pretrained(settings)
    whole, resumed = (
        checkpoints.load(checkpoints.newest(tmp_path / name)).student for name in ("alone", "run")
    )
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def test_training_goes_on_while_the_best_checkpoint_waits_for_room(tmp_path, monkeypatch):
    """Three steps an epoch: that of the first is the best so far, and no step waits but the next save."""
    monkeypatch.setattr(writing, "SECONDS_BETWEEN_TRIES", 0.02)
    write_image_folder(tmp_path / "images", classes=2, per_class=8, size=20)
    out, seen = tmp_path / "run", []
    settings = config(out, epochs=2, on_full_disk="wait")
    settings.knn = schema.Knn(k=[3], size=16, crop_ratio=1.0)

    def make_room() -> None:
        end = time.monotonic() + 20
        while not seen or (seen[-1][0] < 5 and time.monotonic() < end):
            time.sleep(0.01)
            last = read(out / "log.jsonl")[-1:] if (out / "log.jsonl").exists() else []
            seen.append((last[0]["step"] if last else 0, len(checkpoints.saved(out))))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    limits, room = resource.getrlimit(resource.RLIMIT_FSIZE), threading.Thread(target=make_room)
    with files_of_at_most(20_000):
        room.start()
        pretrained(settings)
        room.join()
    step, saved = seen[-1]
    assert step >= 5
    assert saved == 0
    judged = read(out / "log.jsonl")[3::3]
    best = max(judged, key=lambda record: (record["knn/cls/top1_k3"], record["step"]))
    assert checkpoints.pointed(out, checkpoints.BEST).name == f"step_{best['step']:08d}"


RECIPE = [
    *("recipes/dino_xcit.py", "backbone.name=xcit_nano_12_p4", "data.num_workers=0", "log.progress=plain"),
    *("backbone.options={embed_dim: 16, depth: 2, num_heads: 2}", "train.epochs=2", "knn.every=0"),
    *("views.global_size=16", "views.local_size=8", "views.num_local=2", "train.batch_size=4"),
    *("head.hidden_dim=32", "head.bottleneck_dim=16", "optim.warmup_epochs=1"),
    "teacher.temperature_warmup_epochs=1",
]


def printed(command, repository) -> tuple[int, str]:
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_full_disk_ends_all_processes_of_a_run(tmp_path, repository):
    data = write_image_folder(tmp_path / "images", classes=2, per_class=8, size=20)
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc_per_node", "2"]
    limited = ["bash", "-c", 'ulimit -f 20 && exec "$@"', "bash"]  # of 1024 bytes
    settings = [f"data.train={data}", f"out={tmp_path / 'run'}", "head.num_prototypes=512"]
    code, said = printed([*limited, *torchrun, *RECIPE, *settings], repository)
    assert code != 0
    assert "error: the checkpoint of step 1 can't be written to out=" in said, said
    assert said.count("can't be written") == 1
    assert not list((tmp_path / "run/checkpoints").iterdir())


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="needs the right to mount a small disk")
def test_a_disk_too_small_is_refused_before_the_run_directory_is_made(tmp_path, repository):
    data = write_image_folder(tmp_path / "images", classes=2, per_class=8, size=20)
    small = tmp_path / "disk"
    small.mkdir()
    start = [*SMALL_DISK, str(small), "sh", "-c", '"$@"; code=$?; ls "$0"; exit $code', str(small)]
    settings = [f"data.train={data}", f"out={small / 'run'}", "head.num_prototypes=50000"]
    code, said = printed([*start, sys.executable, *RECIPE, *settings], repository)
    assert code == 2
    assert re.search(
        r"error: out=.*/run: the disk has 4\.19 MB free and two checkpoints of this run take \d\d\.\d MB;",
        said,
    ), said
    assert "\nrun" not in said, "nothing was made"
