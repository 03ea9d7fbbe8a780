import subprocess
import sys

import pytest


@pytest.mark.slow
def test_a_second_start_takes_less_than_a_scan(repository, tmp_path):
    command = [sys.executable, repository / "benchmarks/index_start.py", "--files", "10000"]
    done = subprocess.run([*command, "--folder", tmp_path], capture_output=True, text=True, check=True)
    rows = dict(line.rsplit(maxsplit=1) for line in done.stdout.splitlines()[1:])
    assert list(rows) == ["first scan", "second start", "torchvision"]
    assert float(rows["second start"]) < float(rows["first scan"])
    assert list(tmp_path.iterdir()) == []
