"""Networks in grad mode under what a gradient written out knows nothing of: traced graphs and torch.func."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from nestling import backbones
from nestling.backbones import windows as windows_module
from nestling.backbones.layers import DropPath

pytestmark = [  # torch.func.jvp is scripted too
    pytest.mark.filterwarnings(r"ignore:.*torch\.jit\..* is (deprecated|not supported)"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]
NETWORKS = {
    "xcit_nano_12_p16": {"embed_dim": 16, "depth": 1, "num_heads": 2, "cls_depth": 1},
    "vit_tiny_p16": {"embed_dim": 16, "depth": 1, "num_heads": 2, "position_size": 32},
    "swin_tiny_w7": {"embed_dim": 8, "depth": 2, "num_heads": 1, "window": 3},
}
BY_HAND = ["xcit_nano_12_p16", "swin_tiny_w7"]


def tiny(name):
    torch.manual_seed(0)
    return backbones.create(name, **NETWORKS[name]).double().eval()


class Vectors(nn.Module):
    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone

    def forward(self, images):
        return self.backbone(images).cls


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_traced_in_grad_mode_is_saved_and_trains_once_loaded(name, tmp_path):
    model, images = Vectors(tiny(name)), torch.randn(2, 3, 32, 32).double()
    with torch.jit.optimized_execution(False):  # optimising takes seconds, and so does a check of the trace
        torch.jit.trace(model, images, check_trace=False).save(tmp_path / "traced.pt")
        loaded = torch.jit.load(tmp_path / "traced.pt")
        found = loaded(images)
        found.square().sum().backward()
    expected = model(images)
    expected.square().sum().backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    for (key, ours), theirs in zip(model.named_parameters(), loaded.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad, ours.grad, rtol=0, atol=1e-9, msg=key)


@pytest.mark.parametrize("name", BY_HAND)
def test_transforms_give_the_gradients_of_autograd_and_leave_nothing_behind(name):
    model, images = tiny(name), torch.randn(2, 3, 64, 96).double()
    direction = torch.randn(2, model.embed_dim).double()

    def loss(parameters, images):
        return (functional_call(model, parameters, (images,)).cls * direction).sum()

    windows_module._kept.cache_clear()
    state = {key: parameter.detach() for key, parameter in model.named_parameters()}
    found = torch.func.grad(loss)(state, images)
    of_images = torch.func.grad(loss, 1)(dict(model.named_parameters()), images)
    _, change = torch.func.jvp(lambda x: loss(state, x), (images,), (torch.ones_like(images),))
    torch.testing.assert_close(change, of_images.sum(), rtol=0, atol=1e-9)
    torch.func.grad(lambda x: torch.func.grad(loss, 1)(state, x).square().sum())(images)

    images.requires_grad_()
    (model(images).cls * direction).sum().backward()
    torch.testing.assert_close(of_images, images.grad, rtol=0, atol=1e-9)
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[key], parameter.grad, rtol=0, atol=1e-9, msg=key)


def test_swin_is_mapped_over_images():
    model, images = tiny("swin_tiny_w7"), torch.randn(2, 3, 40, 64).double()
    found = torch.func.vmap(lambda image: model(image[None]).cls[0])(images)
    torch.testing.assert_close(found, model(images).cls, rtol=0, atol=1e-10)


def test_a_rate_of_drop_path_set_later_is_the_one_that_acts():
    compiled, graphs = DropPath(0.3), []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled.compile(backend=backend, fullgraph=True)
    x = torch.empty(1000, 1)
    for rate in (0.3, 0.5):
        compiled.rate = rate
        factors = compiled(x)
        assert factors.unique().tolist() == pytest.approx([0, 1 / (1 - rate)])
        assert (compiled.rate, compiled.drops, len(graphs)) == (rate, True, 1)
    compiled.rate = 0.0
    assert not compiled.drops
    assert "rate=0.0" in repr(compiled)
