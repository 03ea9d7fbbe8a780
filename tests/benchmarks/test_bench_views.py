import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_views_are_compared_with_each_peer(repository, tmp_path):
    command = [sys.executable, repository / "benchmarks/views.py", "--quick", "--threads", "1"]
    command += ["--device", "cpu", "--json", "views.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "views.json").read_text())["rows"]
    assert {row["part"] for row in rows} == {
        f"views of {size}, {what}"
        for size in ("500 x 375", "1600 x 1200")
        for what in ("bytes", "normalised floats")
    }
    assert {row["peer"] for row in rows} == {
        "torchvision v1 as DINO composes",
        "lightly DINOTransform",
        "torchvision v2 on tensors",
    }
