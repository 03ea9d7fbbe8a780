import pytest
import torch
from torch import nn


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
