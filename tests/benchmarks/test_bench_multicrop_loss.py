import json
import subprocess
import sys

import pytest
import torch

PEERS = ["pair loop, as in the paper", "pair loop, as in the paper", "lightly DINOLoss"]


@pytest.mark.slow
def test_the_loss_is_compared_with_every_peer(repository, tmp_path):
    script = repository / "benchmarks/multicrop_loss.py"
    command = [sys.executable, script, "--quick", "--threads", "1", "--json", "rows.json", "--device", "cpu"]
    subprocess.run(command, cwd=tmp_path, check=True)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["peer"] for row in rows if row["part"].endswith("fp32")] == PEERS
    assert [row["peer"] for row in rows if row["part"].endswith("bf16")] == PEERS[:2]


def test_a_peer_that_computes_something_else_is_refused(repository, monkeypatch):
    monkeypatch.syspath_prepend(repository / "benchmarks")
    from multicrop_loss import agree

    agree("losses", torch.ones(3), torch.ones(3) + 1e-7, 1e-5)
    with pytest.raises(ValueError, match=r"losses are 0\.01 of their norm apart, over 1e-05"):
        agree("losses", torch.ones(3) * 1.01, torch.ones(3), 1e-5)
