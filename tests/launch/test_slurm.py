"""The SLURM launcher, run by submitit's executor for this machine."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from nestling.launch import slurm

RECIPE = """
import os, signal, sys, time
from pathlib import Path

folder = Path(sys.argv[1])
rank = os.environ.get("RANK", "alone")
names = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
(folder / f"rank_{rank}").write_text(" ".join(os.environ.get(name, "-") for name in names))
if "meet" in sys.argv:
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor([float(rank) + 1])
    dist.all_reduce(total)
    (folder / f"sum_{rank}").write_text(str(total.item()))
    dist.destroy_process_group()
if "wait" in sys.argv and not (folder / "stopped").exists():
    def stop(*_):
        (folder / "stopped").touch()
        sys.exit(0)
    signal.signal(signal.SIGTERM, stop)
    (folder / "waiting").touch()
    time.sleep(120)
if "over" in sys.argv:
    times = folder / f"times_{rank}"
    times.write_text((times.read_text() if times.exists() else "") + "x")
    sys.exit(75 if times.read_text() == "x" else 0)
if "stop" in sys.argv:
    sys.exit(143)
sys.exit(3 if "fail" in sys.argv else 0)
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "say.py"
    path.write_text(RECIPE)
    return path


def launch(tmp_path: Path, recipe: Path, processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    options = ["--cluster", "local", "--wait", "--gpus", "0", "--processes", str(processes), "--cpus", "1"]
    command = [sys.executable, "-m", "nestling.launch.slurm", *options, "--folder", tmp_path / "jobs", recipe]
    return subprocess.run(
        [*command, tmp_path, *arguments], capture_output=True, text=True, timeout=180, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["dino_xcti"], "did you mean dino_xcit?"), (["missing.py"], "missing.py")],
)
def test_an_unknown_recipe_is_refused_before_anything_is_queued(
    arguments: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("submitit")
    folder = tmp_path / "jobs"
    assert slurm.main(["--cluster", "local", "--folder", str(folder), *arguments]) == 2
    assert named in capsys.readouterr().err
    assert not folder.exists()


def test_options_stand_before_the_recipe_and_the_rest_is_its_own() -> None:
    options = slurm.parser().parse_args(["--nodes", "2", "dino_xcit", "--config", "x", "--nodes", "a=1"])
    assert (options.nodes, options.recipe) == (2, "dino_xcit")
    assert options.arguments == ["--config", "x", "--nodes", "a=1"]


@pytest.mark.slow
def test_each_process_of_a_job_knows_its_rank_and_they_meet(tmp_path: Path, recipe: Path) -> None:
    pytest.importorskip("submitit")
    done = launch(tmp_path, recipe, 2, "meet")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(tmp_path / f"rank_{rank}").read_text() for rank in (0, 1)] == ["2 0 2", "2 1 2"]
    assert [(tmp_path / f"sum_{rank}").read_text() for rank in (0, 1)] == ["3.0", "3.0"]


@pytest.mark.slow
def test_a_failing_recipe_fails_the_job_and_its_code_is_told(tmp_path: Path, recipe: Path) -> None:
    pytest.importorskip("submitit")
    done = launch(tmp_path, recipe, 1, "fail")
    assert done.returncode == 1
    assert (tmp_path / "rank_alone").read_text() == "- - -"
    assert f"{recipe} ended with exit code 3" in done.stderr


@pytest.mark.slow
def test_hours_that_are_over_queue_the_job_again_where_it_can_go_on(tmp_path: Path, recipe: Path) -> None:
    pytest.importorskip("submitit")
    done = launch(tmp_path, recipe, 2, "over", "resume=auto")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(tmp_path / f"times_{rank}").read_text() for rank in (0, 1)] == ["xx", "xx"]


@pytest.mark.slow
@pytest.mark.parametrize(("what", "code"), [("over", 75), ("stop", 143)])
def test_a_recipe_that_stopped_has_not_failed_and_says_how_to_go_on(
    what: str, code: int, tmp_path: Path, recipe: Path
) -> None:
    pytest.importorskip("submitit")
    done = launch(tmp_path, recipe, 1, what)
    assert done.returncode == 75, done.stdout + done.stderr
    assert f"{recipe} stopped with exit code {code}; submit it with resume=auto to go on" in done.stderr


@pytest.mark.slow
def test_a_preempted_job_stops_its_recipe_and_is_queued_again(tmp_path: Path, recipe: Path) -> None:
    pytest.importorskip("submitit")
    options = ["--cluster", "local", "--gpus", "0", "--folder", str(tmp_path / "jobs"), str(recipe)]
    job = slurm.submit(slurm.parser().parse_args([*options, str(tmp_path), "wait"]))
    deadline = time.monotonic() + 60
    while not (tmp_path / "waiting").exists():
        assert time.monotonic() < deadline, job.stderr()
        time.sleep(0.1)
    # As on a cluster that signals every process of a step: submitit's process and the recipe below it.
    (task,) = psutil.Process(int(job.job_id)).children()
    for process in (*task.children(), task):
        process.send_signal(signal.SIGUSR2)
    assert job.exception() is None
    assert (tmp_path / "stopped").exists()
    assert "Requeued job" in (job.stdout() or "")


def test_without_slurm_the_message_says_so(
    tmp_path: Path, recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    assert slurm.main(["--folder", str(tmp_path / "jobs"), str(recipe)]) == 2
    assert "srun" in capsys.readouterr().err.lower()
