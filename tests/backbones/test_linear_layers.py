"""Linear layers multiplied by oneDNN: against torch's own, in value and gradient, and where that is done."""

import platform
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from nestling.backbones import linear
from nestling.backbones.linear import Linear, Product, by_onednn

ROWS, IN, OUT = 400, 192, 256  # above WORTH_IT

has_onednn = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")),
    reason="this torch has no oneDNN",
)


@pytest.fixture
def _on_amd(monkeypatch):
    """As on a processor for which oneDNN is the faster."""
    monkeypatch.setattr(linear, "multiplies_faster", lambda: True)


def layer_and_rows(bias=True, width=OUT):
    torch.manual_seed(0)
    return Linear(IN, width, bias=bias), torch.randn(4, ROWS // 4, IN)


def learned(layer, x, apply):
    """The output, and the gradients of a random sum of it."""
    torch.manual_seed(1)
    weights = torch.randn(*x.shape[:-1], layer.out_features, dtype=torch.float32)
    x = x.clone().requires_grad_()
    layer.zero_grad()
    output = apply(x, layer.weight, layer.bias)
    (output * weights).sum().backward()
    return [output.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]


@has_onednn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", [OUT, IN, 64])  # a layer that narrows has its weight's gradient by oneDNN
def test_values_and_gradients_are_those_of_float64(bias, width):
    layer, x = layer_and_rows(bias, width)
    ours = learned(layer, x, Product.apply)
    expected = learned(layer.double(), x.double(), F.linear)
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=3e-6 * float(other.abs().max()))


@has_onednn
@pytest.mark.usefixtures("_on_amd")
@pytest.mark.parametrize("learns", [True, False])
def test_a_layer_uses_it_where_it_is_faster(learns, monkeypatch):
    layer, x = layer_and_rows()
    used = []
    product = linear.product
    monkeypatch.setattr(linear, "product", lambda *given: used.append(1) or product(*given))
    with torch.set_grad_enabled(learns):
        found = layer(x)
    assert used
    assert found.requires_grad == learns
    torch.testing.assert_close(found, F.linear(x, layer.weight, layer.bias), rtol=0, atol=1e-5)


@has_onednn
@pytest.mark.usefixtures("_on_amd")
def test_gradients_that_nobody_asks_for_are_not_computed():
    layer, x = layer_and_rows()
    layer.weight.requires_grad_(False)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(layer.bias.grad, torch.full((OUT,), float(ROWS)))


@pytest.mark.usefixtures("_on_amd")
def test_few_rows_and_other_types_are_left_to_torch():
    layer, x = layer_and_rows()
    assert by_onednn(x, layer.weight)
    assert not by_onednn(x[:, :10], layer.weight)
    assert not by_onednn(torch.ones(4096), torch.ones(4096, 4096))
    assert not by_onednn(x.double(), layer.weight.double())
    assert not by_onednn(x.to("meta"), layer.weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert not by_onednn(x, layer.weight)
        assert layer(x).dtype == torch.bfloat16


@pytest.mark.usefixtures("_on_amd")
def test_a_count_of_operations_sees_torchs_own():
    layer, x = layer_and_rows()
    with FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() == 2 * ROWS * IN * OUT


@pytest.mark.usefixtures("_on_amd")
@pytest.mark.filterwarnings(r"ignore:.*torch\.jit\..* is deprecated")
def test_forward_derivatives_are_those_of_torchs():
    layer, x = layer_and_rows()
    torchs = partial(F.linear, weight=layer.weight, bias=layer.bias)
    ours, theirs = (torch.func.jvp(way, (x,), (torch.ones_like(x),)) for way in (layer, torchs))
    torch.testing.assert_close(ours, theirs)


def test_the_vendor_of_the_processor_is_read(tmp_path):
    told = tmp_path / "cpuinfo"
    told.write_text("processor\t: 0\nvendor_id\t: AuthenticAMD\n\nprocessor\t: 1\nvendor_id\t: other\n")
    assert "AuthenticAMD" in linear.processor(told)
    assert "other" not in linear.processor(told)
    assert linear.processor(tmp_path / "missing") == platform.processor()


def test_a_layer_is_one_of_torchs_with_its_entries():
    layer, _ = layer_and_rows()
    assert isinstance(layer, nn.Linear)
    assert {name: tuple(x.shape) for name, x in layer.state_dict().items()} == {
        "weight": (OUT, IN),
        "bias": (OUT,),
    }
