"""Runs that are asked to stop, or of which a part fails: real launchers, signals and processes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from image_folder import write_image_folder
from recipes_here import said_here
from safetensors.torch import load_file

from nestling.ssl.errors import UserError

BIN = Path(sys.executable).parent
RECIPE = "recipes/dino_xcit.py"
ALONE = [sys.executable]
TORCHRUN = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2"]
TINY = [
    *("backbone.name=xcit_nano_12_p4", "backbone.options={embed_dim: 16, depth: 2, num_heads: 2}"),
    *("views.global_size=16", "views.local_size=8", "views.num_local=2", "data.num_workers=1"),
    *("head.num_prototypes=64", "head.hidden_dim=32", "head.bottleneck_dim=16", "log.every=1"),
    *("knn.k=5", "knn.size=16", "knn.crop_ratio=1.0", "log.progress=plain", "train.precision=fp32"),
    *("train.epochs=3", "optim.warmup_epochs=1", "teacher.temperature_warmup_epochs=1"),
]
UNHELPED = [*(setting for setting in TINY if "num_workers" not in setting), "data.num_workers=0"]
# A thread of gloo may hold a lock of the interpreter while a loader process is forked: it never starts.
FORKSERVER = "data.start_method=forkserver"
TIMES = ("images_per_second", "data_wait")

# The recipe, whose backbone tells a process to do something at a step: it knows both by its seed.
TROUBLED = """
import os, signal, sys, time
import torch
from nestling.backbones.registry import register
from nestling.backbones.xcit import XCiT
from nestling.recipes.dino_xcit import main
from nestling.ssl.command_line import run
from nestling.ssl.randomness import Stream, generator

what, process, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
seed = int(generator(0, Stream.NETWORK, step, process).integers(2**62))

class Troubled(XCiT):
    def forward(self, images, mask=None):
        if torch.initial_seed() != seed:
            return super().forward(images, mask)
        if what == "nan":
            return super().forward(images * torch.nan, mask)
        if what == "raise":
            raise LookupError("the first error of all")
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "hang":
            time.sleep(600)

register({"troubled": {"patch": 4}})(Troubled)
run(main, sys.argv[4:])
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    return write_image_folder(tmp_path_factory.mktemp("stopping") / "images", classes=4, per_class=16)


@contextmanager
def begun(command: list[str], repository: Path) -> Iterator[subprocess.Popen[str]]:
    """A run in a session of its own; what is left of it is killed."""
    with subprocess.Popen(
        command,
        cwd=repository,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            for child in below:
                child.kill()
            process.kill()


def until(line: str, process: subprocess.Popen[str]) -> str:
    """What is printed up to a line that begins so."""
    assert process.stdout is not None
    said = ""
    for printed in process.stdout:
        said += printed
        if printed.startswith(line):
            return said
    raise AssertionError(f"it ended before it printed {line!r}:\n{said}")


def ended(process: subprocess.Popen[str], seconds: float = 60) -> str:
    """The rest of what is printed, once the process has ended."""
    said, _ = process.communicate(timeout=seconds)
    return said


def finished(command: list[str], repository: Path, expected: int = 0) -> str:
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=300)
    assert done.returncode == expected, done.stdout + done.stderr
    return done.stdout + done.stderr


def is_alive(process: psutil.Process) -> bool:
    """Not ended; one that has ended may stay known until someone asks for its code."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_ended(processes: list[psutil.Process]) -> None:
    """None of them outlives the run by more than a moment."""
    end = time.monotonic() + 5
    while any(is_alive(process) for process in processes) and time.monotonic() < end:
        time.sleep(0.05)
    assert not [process for process in processes if is_alive(process)]


def saved(run: Path) -> dict[str, dict[str, torch.Tensor]]:
    folder = run / (run / "last").read_text().strip()
    return {name: load_file(folder / f"{name}.safetensors") for name in ("student", "teacher", "terms")}


def records(run: Path) -> list[dict[str, float]]:
    lines = (run / "log.jsonl").read_text().splitlines()
    parsed = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    return [{key: value for key, value in record.items() if key not in TIMES} for record in parsed]


def assert_same(run: Path, alone: Path) -> None:
    one, other = saved(run), saved(alone)
    for name in other:
        assert one[name].keys() == other[name].keys()
        for key in other[name]:
            assert torch.equal(one[name][key], other[name][key]), f"{name}: {key}"
    assert records(run) == records(alone)


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory, images, repository) -> dict[int, Path]:
    """Runs of one and of two processes at the same global batch that nobody disturbed, 21 steps each."""
    folder = tmp_path_factory.mktemp("alone")
    settings = [f"data.train={images}", *UNHELPED]
    said_here("dino_xcit", [*settings, f"out={folder / '1'}", "train.batch_size=8"])
    finished([*TORCHRUN, RECIPE, *settings, f"out={folder / '2'}", "train.batch_size=4"], repository)
    return {processes: folder / str(processes) for processes in (1, 2)}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_all_processes_saves_and_the_same_command_goes_on_to_the_bit(
    number, images, left_alone, tmp_path, repository
):
    run = tmp_path / "run"
    given = [f"data.train={images}", f"out={run}", "train.batch_size=8", "resume=auto"]
    with begun([*ALONE, RECIPE, *given, *TINY], repository) as process:
        until("step 9/", process)
        loaders = psutil.Process(process.pid).children(recursive=True)
        assert loaders
        os.killpg(process.pid, number)  # as a terminal or a scheduler does: the loaders get it too
        said = ended(process)
        assert process.returncode == 128 + number, said
    assert "Traceback" not in said
    assert said.count(f"stopped: {number.name} received; step_") == 1
    assert "resume=auto goes on" in said
    assert_ended(loaders)
    step = records(run)[-1]["step"]
    assert step % 7, "in mid-epoch"
    assert (run / "last").read_text().strip() == f"checkpoints/step_{step:08d}"
    if number == signal.SIGTERM:  # as a requeued job does; the others need no process of their own
        said = finished([*ALONE, RECIPE, *given, *TINY], repository)
    else:
        said = said_here("dino_xcit", [*given, *UNHELPED])
    assert f"after step {step}" in said
    assert_same(run, left_alone[1])


def test_two_processes_stop_together_when_their_launcher_is_told(images, left_alone, tmp_path, repository):
    run = tmp_path / "run"
    command = [*TORCHRUN, RECIPE, f"data.train={images}", f"out={run}", "train.batch_size=4", "resume=auto"]
    with begun([*command, *TINY, FORKSERVER], repository) as process:
        until("step 9/", process)
        below = psutil.Process(process.pid).children(recursive=True)
        assert len(below) >= 4, "two that train, and the processes that load for them"
        process.terminate()
        start = time.monotonic()
        said = ended(process)
        assert time.monotonic() - start < 25
    assert said.count("stopped: SIGTERM received; step_") == 1
    assert_ended(below)
    step = records(run)[-1]["step"]
    assert f"after step {step}" in finished([*command, *UNHELPED], repository)
    assert_same(run, left_alone[2])


def test_one_of_two_that_is_told_stops_both(images, tmp_path, repository):
    command = [*TORCHRUN, RECIPE, f"data.train={images}", f"out={tmp_path / 'run'}", *UNHELPED]
    with begun([*command, "train.batch_size=4"], repository) as process:
        until("step 3/", process)
        trainers = psutil.Process(process.pid).children()
        second = next(child for child in trainers if child.environ().get("RANK") == "1")
        second.send_signal(signal.SIGUSR1)
        said = ended(process)
        assert process.returncode != 0
    assert said.count("stopped: SIGUSR1 received; step_") == 1
    assert f"exitcode  : {128 + signal.SIGUSR1}" in said
    assert "exitcode  : -" not in said, "none was killed"


def test_hours_that_are_over_save_and_go_on(images, left_alone, tmp_path, repository):
    run = tmp_path / "run"
    given = [f"data.train={images}", f"out={run}", *UNHELPED, "train.batch_size=8", "resume=auto"]
    said = finished([*ALONE, RECIPE, *given, "train.max_hours=0"], repository, expected=75)
    assert "stopped: train.max_hours=0.0 are over; step_00000001 is saved" in said
    said_here("dino_xcit", given)
    assert_same(run, left_alone[1])
    assert "is finished" in finished([*ALONE, RECIPE, *given], repository)
    assert_same(run, left_alone[1])


def troubled(what: str, process: int, images: Path, tmp_path: Path) -> list[str]:
    """Two processes, one of which has a trouble in the tenth step."""
    script = tmp_path / "troubled.py"
    script.write_text(TROUBLED)
    command = [*TORCHRUN, str(script), what, str(process), "9", f"data.train={images}"]
    settings = [setting for setting in UNHELPED if not setting.startswith("backbone.name")]
    return [
        *command,
        f"out={tmp_path / 'run'}",
        *settings,
        "backbone.name=troubled",
        "train.batch_size=4",
    ]


@pytest.mark.parametrize(("what", "process"), [("raise", 1), ("die", 0)])
def test_one_that_fails_ends_the_other_soon_with_the_first_error_on_top(
    what, process, images, tmp_path, repository
):
    with begun(troubled(what, process, images, tmp_path), repository) as launcher:
        until("step 9/", launcher)
        below = psutil.Process(launcher.pid).children(recursive=True)
        start = time.monotonic()
        said = ended(launcher)
        assert time.monotonic() - start < 30
        assert launcher.returncode != 0
    assert_ended(below)
    other = said.find("another process of this run has ended")
    assert said.count("Traceback") - said.count("torch/distributed/run.py") <= 1 + (what == "raise")
    if what == "raise":
        assert "LookupError: the first error of all" in said
        assert other == -1 or said.index("LookupError") < other
    else:
        assert "exitcode  : -9" in said


def test_two_that_can_no_longer_agree_end_before_they_are_killed(images, tmp_path, repository):
    with begun(troubled("hang", 1, images, tmp_path), repository) as launcher:
        until("step 9/", launcher)
        below = psutil.Process(launcher.pid).children(recursive=True)
        time.sleep(1)
        launcher.terminate()
        start = time.monotonic()
        said = ended(launcher)
        assert time.monotonic() - start < 29
    assert "ended at once (no agreement with the other processes)" in said
    assert_ended(below)


def test_a_users_mistake_of_one_process_ends_the_other_too(images, tmp_path, repository):
    bad = write_image_folder(tmp_path / "images", classes=4, per_class=16)
    victim = sorted(bad.rglob("*.png"))[20]
    victim.write_bytes(b"no image any more")
    command = [*TORCHRUN, RECIPE, f"data.train={bad}", f"out={tmp_path / 'run'}", *UNHELPED]
    start = time.monotonic()
    done = subprocess.run(
        [*command, "train.batch_size=4", "data.on_error=raise", "knn.every=0", "data.holdout=0"],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert time.monotonic() - start < 60
    assert victim.name in said
    error = next(line for line in done.stderr.splitlines() if "error: " in line)
    assert victim.name in error, done.stderr


def test_nan_on_one_process_stops_both_in_the_same_step(images, tmp_path, repository):
    said = finished(troubled("nan", 1, images, tmp_path), repository, expected=1)
    assert said.count("error: step 10 has a loss or gradient that is not finite") == 1
    assert "on process 1" in said
    report = json.loads((tmp_path / "run" / "nonfinite.json").read_text(), parse_constant=pytest.fail)
    zero, one = report["processes"]
    assert zero["first_module"] is None
    assert one["first_module"].startswith("teacher.backbone.patch_embed")
    assert len(one["micro_batches"][0]["files"]) == 4
    assert records(tmp_path / "run")[-1]["step"] == 9
    assert (tmp_path / "run" / "last").read_text().strip() == "checkpoints/step_00000007"
    assert "nonfinite holds the state before it" in said.replace("\n", " ")
    aside = tmp_path / "run" / "nonfinite"
    assert (aside / "last").read_text().strip() == "checkpoints/step_00000009"
    assert all(value.isfinite().all() for part in saved(aside).values() for value in part.values())


def test_nan_on_one_process_is_left_out_by_both(images, tmp_path, repository):
    said = finished([*troubled("nan", 1, images, tmp_path), "train.on_nan=skip"], repository)
    assert "step 10 is left out" in said
    log = records(tmp_path / "run")
    assert [record["step"] for record in log if record.get("skipped_steps")] == [10]
    assert all(value.isfinite().all() for part in saved(tmp_path / "run").values() for value in part.values())


def test_a_launcher_that_started_another_number_is_refused(images, tmp_path):
    given = [f"data.train={images}", f"out={tmp_path / 'run'}", *UNHELPED, "expect_world_size=2"]
    with pytest.raises(UserError, match=r"expect_world_size=2, but the launcher started 1"):
        said_here("dino_xcit", given)
    assert not (tmp_path / "run").exists()
