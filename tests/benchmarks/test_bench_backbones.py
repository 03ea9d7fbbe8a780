"""The comparison with timm says when the two don't compute the same."""

from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytest.importorskip("timm")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import backbones  # the benchmark's module: the package is nestling.backbones

    return backbones


@pytest.mark.slow
def test_other_weights_are_no_comparison(script):
    cpu = torch.device("cpu")
    twins = script.Twins.of("vit_small_p16", cpu, depth=1)
    case = script.training_case(twins, script.views_of({32: 2}, 1, cpu), False, None, 1)
    case.check()
    with torch.no_grad():
        twins.theirs.blocks[0].mlp.fc1.weight[0, 0] += 1
    with pytest.raises(ValueError, match="differs from timm's by"):
        case.check()
