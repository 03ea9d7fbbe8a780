import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_packed_paths_cost_a_fraction_of_a_list_however_workers_start(repository):
    command = [
        sys.executable,
        repository / "benchmarks/path_memory.py",
        "--paths",
        "100000",
        "--workers",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == ["fork", "spawn"]
    for start, packed, part, strings in rows:
        assert max(float(packed), float(part)) < float(strings) / 2, start
