import pytest
import torch

pytest.importorskip("timm")
pytest.importorskip("torchvision")


@pytest.mark.slow
def test_its_check_refuses_another_padding(repository, monkeypatch):
    monkeypatch.syspath_prepend(repository / "benchmarks")
    import swin

    torch.manual_seed(0)
    views = [torch.randn(1, 3, 96, 96)]
    swin.case("equal", "torchvision", "attended", views, True, False, 1).check()
    with pytest.raises(AssertionError, match="differ"):
        swin.case("other", "torchvision", "masked", views, True, False, 1).check()
