"""How many loader processes, and what is said when one dies."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from image_folder import write_image_folder

from nestling.ssl.config import Config, Data
from nestling.ssl.data.loader import TrainLoader
from nestling.ssl.data.sources.opening import open_source
from nestling.ssl.data.workers import default_workers, explained
from nestling.ssl.distributed import usable_cpus
from nestling.ssl.errors import UserError


def test_default_workers_share_out_the_usable_cpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    assert default_workers(on_cpu=False) == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert default_workers(on_cpu=False) == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert default_workers(on_cpu=False) == 0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert default_workers(on_cpu=True) == 0


def test_usable_cpus_are_those_this_process_is_bound_to():
    assert 1 <= usable_cpus() <= len(os.sched_getaffinity(0))


def test_a_containers_quota_bounds_the_usable_cpus(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr("nestling.ssl.distributed.CPU_QUOTAS", (str(tmp_path / "absent"), str(quota)))
    for text, usable in (("400000 100000\n", 4), ("max 100000\n", 64), ("50000 100000\n", 1)):
        quota.write_text(text)
        assert usable_cpus() == usable


def slow_config(start_method):
    cfg = Config(data=Data(num_workers=2, start_method=start_method))
    cfg.train.batch_size, cfg.views.num_local = 4, 0
    cfg.views.global_size = [64]
    return cfg


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_a_worker_killed_from_outside_ends_the_iteration_in_one_sentence(image_folder, start_method):
    cfg = slow_config(start_method)
    source = open_source(Data(train=str(image_folder())), "train")

    def killed():
        with TrainLoader(source, cfg, 10_000, 0, 1) as loader:
            iterator = iter(loader)
            next(iterator)
            os.kill(loader._iterator._workers[0].pid, signal.SIGKILL)
            while next(iterator):
                time.sleep(0.001)

    start = time.monotonic()
    with pytest.raises(
        UserError, match=r"^loader process( \d+)? was killed from outside or crashed.*num_workers"
    ):
        killed()
    assert time.monotonic() - start < 60


def test_other_errors_are_not_taken_for_the_death_of_a_worker():
    assert explained(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert explained(ValueError("DataLoader worker (pid 3) is killed by signal: Killed.")) is None


def test_a_bus_error_is_told_as_full_shared_memory():
    said = explained(RuntimeError("DataLoader worker (pid 3) is killed by signal: Bus error. It is possible"))
    assert said is not None
    assert said.startswith("loader process 3 died: shared memory (/dev/shm) is full")


FULL = """
    import sys
    from nestling.ssl.config import Config, Data
    from nestling.ssl.data.loader import EvalLoader, TrainLoader
    from nestling.ssl.data.sources.opening import open_source
    from nestling.ssl.errors import UserError
    from nestling.ssl.views.evaluation import Centre

    cfg = Config(data=Data(train=sys.argv[1], num_workers=2))
    cfg.train.batch_size, cfg.views.num_local, cfg.views.global_size = 4, 0, [512]
    source = open_source(cfg.data, "train")
    judged = EvalLoader(source, cfg.data, Centre((1024, 1024), 1.0), 4, num_workers=2)
    for loader in (TrainLoader(source, cfg, 50, 0, 1), judged):
        try:
            list(loader)
        except UserError as error:
            print(error)
"""
SMALL_SHARED_MEMORY = [
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount -t tmpfs -o size=4m tmpfs /dev/shm && exec "$@"',
    "sh",
]


def can_mount():
    return not subprocess.run([*SMALL_SHARED_MEMORY, "true"], capture_output=True, check=False).returncode


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or not can_mount(), reason="needs the right to mount a small /dev/shm"
)
def test_full_shared_memory_is_named_and_nothing_hangs(tmp_path):
    images = write_image_folder(tmp_path / "images", classes=2, per_class=8)
    script = tmp_path / "full.py"
    script.write_text(textwrap.dedent(FULL))
    ran = subprocess.run(
        [*SMALL_SHARED_MEMORY, sys.executable, str(script), str(images)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = ran.stdout.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("shared memory (/dev/shm) is full") for line in lines)


BESIDE_OTHERS = """
    import multiprocessing, sys
    import torch.distributed as dist
    from nestling.ssl.config import Config, Data
    from nestling.ssl.data.loader import TrainLoader
    from nestling.ssl.data.sources.opening import open_source

    if __name__ == "__main__":
        dist.init_process_group("gloo")
        cfg = Config(data=Data(train=sys.argv[1], num_workers=1))
        cfg.train.batch_size, cfg.views.num_local, cfg.views.global_size = 4, 0, [16]
        source = open_source(cfg.data, "train")
        with TrainLoader(source, cfg, 1, dist.get_rank(), dist.get_world_size()) as loader:
            next(iter(loader))
            kinds = [type(child).__name__ for child in multiprocessing.active_children()]
            print(dist.get_world_size(), kinds)
        dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.accelerator.is_available(), reason="is about processes that train on CPUs")
def test_beside_other_processes_on_cpus_none_is_forked_from_a_process_with_threads(tmp_path):
    images = write_image_folder(tmp_path / "images", classes=2, per_class=8)
    script = tmp_path / "beside.py"
    script.write_text(textwrap.dedent(BESIDE_OTHERS))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    ran = subprocess.run(
        [*launcher, str(script), str(images)], capture_output=True, text=True, timeout=200, check=True
    )
    assert ran.stdout.splitlines() == ["2 ['ForkServerProcess']"] * 2
