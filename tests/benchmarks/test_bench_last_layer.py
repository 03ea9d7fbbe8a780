import json
import subprocess
import sys

import pytest

PEERS = [
    "own layer, then log-sum-exp",
    "torch weight_norm, then pair loop",
    "lightly by view, then DINOLoss",
]


@pytest.mark.slow
def test_the_last_layer_is_compared_with_every_peer(repository, tmp_path):
    script = repository / "benchmarks/last_layer.py"
    command = [sys.executable, script, "--quick", "--threads", "1", "--json", "rows.json", "--device", "cpu"]
    subprocess.run(command, cwd=tmp_path, check=True)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["peer"] for row in rows if row["part"].endswith("fp32")] == PEERS
    assert [row["peer"] for row in rows if row["part"].endswith("bf16")] == PEERS[:2]
