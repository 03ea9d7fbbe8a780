"""The steps that the comparison takes, on the CPU; it has no case there."""

import json
import subprocess
import sys

import pytest
import torch

CODE = """
import torch
from prefetching import Batch, Prefetched, stepped
views = [torch.full((2, 3, 4, 4), 7, dtype=torch.uint8), torch.ones(8, 3, 2, 2, dtype=torch.uint8)]
batches = [Batch(views, torch.arange(1), step, [], 0) for step in range(3)]
print(stepped(Prefetched(iter(batches), None), torch.eye(4)).tolist())
"""


@pytest.mark.slow
def test_sending_ahead_is_compared_where_there_is_a_gpu(repository, tmp_path):
    script = repository / "benchmarks/prefetching.py"
    steps = subprocess.run([sys.executable, "-c", CODE], cwd=script.parent, capture_output=True, text=True)
    assert json.loads(steps.stdout) == [7 * 96 + 96] * 3, steps.stderr
    command = [sys.executable, script, "--quick", "--threads", "1", "--json", "found.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert len(rows) == torch.cuda.is_available()
