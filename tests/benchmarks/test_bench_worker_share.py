import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_the_worker_share_is_compared_with_torchvision_and_checked(repository, tmp_path):
    command = [sys.executable, repository / "benchmarks/worker_share.py", "--quick", "--threads", "1"]
    command += ["--device", "cpu", "--json", "found.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [(row["part"], row["peer"]) for row in rows] == [
        ("loader's share, 4 images", "torchvision v1, as DINO composes"),
        ("colours of 4 images", "the same in the loader"),
    ]
