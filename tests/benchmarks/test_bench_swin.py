import json
import subprocess
import sys

import pytest
import torch

pytest.importorskip("timm")
pytest.importorskip("torchvision")


@pytest.mark.slow
def test_a_step_of_swin_is_timed_beside_both_peers(repository, tmp_path):
    command = [
        sys.executable,
        repository / "benchmarks/swin.py",
        "--quick",
        "--device",
        "cpu",
        "--threads",
        "1",
    ]
    subprocess.run([*command, "--json", "rows.json"], check=True, cwd=tmp_path)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["part"], row["peer"]) for row in rows] == [
        ("Swin-T step, 224 px", "timm"),
        ("Swin-T step, 224 px", "torchvision"),
        ("Swin-T step, 2 x 224 + 8 x 96 px", "torchvision"),
        ("Swin-T step, bf16, 96 px", "torchvision"),
    ]


@pytest.mark.slow
def test_its_check_refuses_another_padding(repository, monkeypatch):
    monkeypatch.syspath_prepend(repository / "benchmarks")
    import swin

    torch.manual_seed(0)
    views = [torch.randn(1, 3, 96, 96)]
    swin.case("equal", "torchvision", "attended", views, True, False, 1).check()
    with pytest.raises(AssertionError, match="differ"):
        swin.case("other", "torchvision", "masked", views, True, False, 1).check()
