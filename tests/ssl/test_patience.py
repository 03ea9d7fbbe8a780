"""Processes that wait for their main one: longer than a collective may take, but not for one that is gone."""

import subprocess
import sys
import textwrap

import pytest

from nestling.ssl.run.processes import GONE

# Pairs of forked processes whose collectives may take two seconds. What each says goes to a file of its own.
PAIRS = """
    import os, signal, socket, sys, time
    from datetime import timedelta
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from nestling.ssl import distributed
    from nestling.ssl.distributed import failing_together, patiently, summed
    from nestling.ssl.errors import UserError

    distributed.BEAT, distributed.SILENCE = timedelta(seconds=0.1), timedelta(seconds=2)

    def act(what, rank):
        with failing_together(), patiently():
            if rank == 0 and what == "late":
                time.sleep(4)
            if rank == 0 and what == "refuses":
                time.sleep(1)
                raise UserError("no room")
            if rank == 0 and "dies" in what:
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 0 and what == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
        return str(summed(torch.ones(1)).item())

    def process(what, rank, port):
        begun = time.monotonic()
        store = dist.TCPStore("localhost", port, 2, is_master=rank == 0 and "host" in what)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=2))
        try:
            said = act(what, rank)
        except (UserError, RuntimeError) as error:
            said = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - begun
        (Path(sys.argv[1]) / f"{what}_{rank}").write_text(f"{seconds:.1f} {said}")
        os._exit(0)

    pairs = []
    for what in ("late", "refuses", "dies", "host dies", "stopped"):
        with socket.create_server(("localhost", 0)) as free:
            port = free.getsockname()[1]
        keeper = os.fork()  # of the store, as a launcher is: it outlives the main process
        if not keeper:
            if "host" not in what:
                store = dist.TCPStore("localhost", port, 2, is_master=True, wait_for_workers=False)
            time.sleep(300)
        pair = []
        for rank in (0, 1):
            child = os.fork()
            if not child:
                process(what, rank, port)
            pair.append(child)
        pairs.append((keeper, *pair))
    for keeper, first, second in pairs:
        os.waitpid(second, 0)
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        os.kill(keeper, signal.SIGKILL)
        os.waitpid(keeper, 0)
"""


@pytest.mark.slow
def test_a_main_process_is_waited_for_while_it_lives(tmp_path):
    script = tmp_path / "pairs.py"
    script.write_text(textwrap.dedent(PAIRS))
    subprocess.run([sys.executable, "-W", "ignore", str(script), str(tmp_path)], check=True, timeout=300)
    said = {path.name: path.read_text().split(" ", 1) for path in tmp_path.glob("*_[01]")}
    assert said["late_1"][1] == "2.0"
    assert float(said["late_1"][0]) >= 4, "twice what a collective may take"
    assert said["refuses_0"][1] == said["refuses_1"][1] == "UserError: no room"
    for gone in ("dies_1", "host dies_1", "stopped_1"):
        assert GONE.search(said[gone][1]), "explained in one sentence"
        assert float(said[gone][0]) < 20
    assert "given no sign of life for 0:00:02" in said["stopped_1"][1]
