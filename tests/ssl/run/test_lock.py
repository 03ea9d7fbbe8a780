"""Who may start in a run directory: real processes, ended by real signals."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap

import psutil
import pytest

from nestling.ssl.config import Config
from nestling.ssl.errors import UserError
from nestling.ssl.run import directory, lock

# Holds a run directory, with a forked child that outlives it, as a loader process may.
HOLDER = """
    import os, sys, time
    from pathlib import Path
    from nestling.ssl.run import lock
    lock.hold(Path(sys.argv[1]))
    if os.fork() == 0:
        print(os.getpid(), flush=True)  # from then on the child holds nothing, however busy the machine is
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def nothing_held():
    with lock.let_go_at_the_end():
        yield


def write_run(folder) -> dict[str, str]:
    directory.write_json(folder / "environment.json", directory.environment())
    (folder / "log.jsonl").write_text("{}\n")
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_second_start_is_refused_by_who_holds_it_until_that_one_is_killed(tmp_path):
    content = write_run(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLDER), str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        child = psutil.Process(int(holder.stdout.readline()))
        try:
            who = rf"out=.* is held by process {holder.pid} on {socket.gethostname()}, there since \d{{4}}-"
            for settings in ({}, {"overwrite": True}, {"resume": "auto"}):
                with pytest.raises(UserError, match=who):
                    directory.claim(Config(out=str(tmp_path), **settings))
            left = {path.name: path.read_text() for path in tmp_path.iterdir() if path.name != lock.FILE}
            assert left == content
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            assert child.is_running()
            directory.claim(Config(out=str(tmp_path), overwrite=True))
            assert json.loads((tmp_path / lock.FILE).read_text())["pid"] == os.getpid()
            assert child.is_running()
        finally:
            child.kill()
    lock.let_go()
    assert not list(tmp_path.iterdir())


def test_a_process_holds_a_folder_once_and_again_after_it_let_go(tmp_path):
    lock.hold(tmp_path)
    with pytest.raises(UserError, match=f"held by process {os.getpid()} on "):
        lock.hold(tmp_path)
    lock.let_go()
    lock.hold(tmp_path)


def test_a_refused_start_lets_go_and_leaves_nothing(tmp_path):
    (tmp_path / "mine.txt").write_text("")
    with pytest.raises(UserError, match="no run of nestling"), lock.let_go_at_the_end():
        directory.claim(Config(out=str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_file_system_without_locks_is_said_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    def unknown(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unknown)
    assert directory.claim(Config(out=str(tmp_path / "run"))) is None
    assert directory.claim(Config(out=str(tmp_path / "run"))) is None
    assert "has no locks (No locks available), so nothing would notice a second start" in caplog.text
    assert not list((tmp_path / "run").iterdir())


def test_a_lock_that_another_machine_left_behind_is_said(tmp_path, caplog):
    said = {"host": "node7", "pid": 1234, "since": "2026-01-01 10:00:00 +0000"}
    (tmp_path / lock.FILE).write_text(json.dumps(said))
    lock.hold(tmp_path)
    assert "left behind by process 1234 on node7, there since 2026-01-01" in caplog.text


@pytest.mark.parametrize("beside", [[], ["thesis.txt"]])
def test_a_strangers_file_of_the_same_name_is_refused_and_left_alone(beside, tmp_path):
    for name in (lock.FILE, *beside):
        (tmp_path / name).write_text("mine")
    with pytest.raises(UserError, match=r"run\.lock is no lock of nestling; name another out"):
        directory.claim(Config(out=str(tmp_path)))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(
        (lock.FILE, *beside), "mine"
    )


def test_a_folder_of_other_files_is_refused_without_a_lock_beside_them(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="no run of nestling"):
        directory.claim(Config(out=str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_lock_file_that_is_gone_does_not_hide_why_a_run_ended(tmp_path):
    @lock.let_go_at_the_end()
    def run() -> None:
        lock.hold(tmp_path)
        (tmp_path / lock.FILE).unlink()
        raise UserError("the reason")

    with pytest.raises(UserError, match="the reason"):
        run()


def test_asking_touches_nothing_and_leaves_the_lock_to_be_taken(tmp_path):
    lock.refuse_held(tmp_path)
    assert not list(tmp_path.iterdir())
    lock.hold(tmp_path)
    lock.refuse_held(tmp_path)
    lock.let_go()
    assert not list(tmp_path.iterdir())
