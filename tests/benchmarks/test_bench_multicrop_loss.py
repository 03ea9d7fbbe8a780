import pytest
import torch


def test_a_peer_that_computes_something_else_is_refused(repository, monkeypatch):
    monkeypatch.syspath_prepend(repository / "benchmarks")
    from multicrop_loss import agree

    agree("losses", torch.ones(3), torch.ones(3) + 1e-7, 1e-5)
    with pytest.raises(ValueError, match=r"losses are 0\.01 of their norm apart, over 1e-05"):
        agree("losses", torch.ones(3) * 1.01, torch.ones(3), 1e-5)
