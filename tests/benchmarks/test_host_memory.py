"""A run's host memory over its steps, by the benchmark that measures two thousand."""

import subprocess
import sys
from pathlib import Path

import pytest

STEPS = ["--steps", "140", "--images", "260", "--workers", "1"]
# Keeps the images of each batch that its student sees: a leak of one batch per step, 245 kB.
LEAKY = """
from torch import Tensor, nn

kept = []

class Leaky(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 4, stride=4)

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            kept.append(images.clone())
        return self.stem(images).tanh().mean((2, 3))
"""


def measured(repository: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        repository / "benchmarks" / "host_memory.py",
        *STEPS,
        "--limit",
        "100",
        *settings,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_host_memory_does_not_grow_and_a_leak_of_a_batch_per_step_is_seen(repository, tmp_path, monkeypatch):
    done = measured(repository)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("140 steps of 32 images, 1 loader process")
    (tmp_path / "leaky.py").write_text(LEAKY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    leaking = measured(repository, "backbone.name=leaky:Leaky", "backbone.options={}", "backbone.drop_path=0")
    assert leaking.returncode == 1, leaking.stdout + leaking.stderr
    assert "host memory grows by" in leaking.stderr
