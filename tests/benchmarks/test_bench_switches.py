import json
import subprocess
import sys

import pytest
import torch
from torch import nn


@pytest.mark.slow
def test_each_switch_is_timed_beside_the_step_without_it(repository, tmp_path):
    command = [sys.executable, repository / "benchmarks/switches.py", "--quick", "--device", "cpu"]
    subprocess.run([*command, "--threads", "1", "--json", "rows.json"], check=True, cwd=tmp_path)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    families = ("xcit_small_12_p16", "vit_small_p16", "swin_tiny_w7")
    assert [(row["part"], row["peer"]) for row in rows] == [
        *((f"activation checkpointing, {name}, 2 x 64 px", "without") for name in families),
        *(
            (f"channels-last, patches of {name}, {images} px", "contiguous")
            for name in families
            for images in ("2 x 64", "8 x 32")
        ),
    ]


def test_their_check_refuses_other_gradients(repository, monkeypatch):
    monkeypatch.syspath_prepend(repository / "benchmarks")
    import switches

    torch.manual_seed(0)
    layer, images = nn.Linear(4, 4), torch.randn(2, 4)
    found = switches.step(layer, layer, images), switches.gradients(layer)
    switches.compare(found, found)
    other = {name: gradient * 1.01 for name, gradient in found[1].items()}
    with pytest.raises(AssertionError, match="the gradients of weight differ"):
        switches.compare((found[0], other), found)
