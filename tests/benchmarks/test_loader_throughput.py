import subprocess
import sys

import pytest


@pytest.mark.slow
def test_throughput_is_told_for_each_number_of_workers(repository, tmp_path):
    command = [sys.executable, repository / "benchmarks/loader_throughput.py", "--workers", "0", "1"]
    command += ["--images", "8", "--batches", "3", "train.batch_size=4", "views.color_on=device"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    title, header, *rows = done.stdout.splitlines()
    assert title.startswith("8 JPEGs of 500 x 375, batches of 4, ")
    assert title.endswith("views.color_on=device")
    assert header.split() == ["workers", "images/s", "per", "core", "CPU", "ms", "per", "image"]
    numbers = [[float(cell) for cell in row.split()] for row in rows]
    assert [row[0] for row in numbers] == [0, 1]
    assert all(number > 0 for row in numbers for number in row[1:])
    assert list(tmp_path.iterdir()) == []
