"""The compiled GELU against torch's in float64, and where torch's own is taken."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from nestling.backbones import gelu, kernels
from nestling.backbones.gelu import Gelu, MapGelu

pytestmark = pytest.mark.skipif(gelu.kernel is None, reason="the kernel is not built: run pip install -e .")


def learned(x, direction, function):
    x = x.clone().requires_grad_()
    output = function(x)
    output.backward(direction.to(x.dtype))
    return output.detach(), x.grad


def drawn(*shape, spread=1.0, dtype=torch.float32):
    torch.manual_seed(0)
    return (torch.randn(shape) * spread).to(dtype)


def errors(found, wanted):
    return [(a.double() - b).abs().max() for a, b in zip(found, wanted, strict=True)]


def exactly(x):
    """Phi by its logarithm, as torch's float64 GELU loses the left tail."""
    return x * torch.special.log_ndtr(x).exp()


def is_compiled(function, x):
    return "Compiled" in type(function(x).grad_fn).__name__


@pytest.mark.parametrize("spread", [0.1, 1, 5])
def test_values_and_gradients_are_as_near_to_float64_as_torchs(spread):
    x, direction = drawn(64, 1001, spread=spread), drawn(64, 1001)
    wanted = learned(x.double(), direction, F.gelu)
    ours = errors(learned(x, direction, Gelu()), wanted)
    theirs = errors(learned(x, direction, F.gelu), wanted)
    assert all(a <= b + 5e-8 for a, b in zip(ours, theirs, strict=True))
    assert max(ours) < 1e-6


def test_in_bf16_values_are_rounded_once_and_gradients_as_near_as_torchs():
    x, direction = drawn(64, 1001, spread=2, dtype=torch.bfloat16), drawn(64, 1001, dtype=torch.bfloat16)
    wanted = learned(x.double(), direction, F.gelu)[1]
    value, ours = learned(x, direction, Gelu())
    assert value.dtype == ours.dtype == torch.bfloat16
    exact = exactly(x.double())
    assert ((value.double() - exact).abs() <= 2**-8 * 1.001 * exact.abs()).all()  # half of the last place
    theirs = learned(x, direction, F.gelu)[1]
    near, nearest = ((found.double() - wanted).square().mean() for found in (ours, theirs))
    assert near <= nearest * 1.01


def test_the_left_tail_keeps_its_digits():
    x = torch.linspace(-12, -1, gelu.WORTH_IT)
    wanted = exactly(x.double())
    value, _ = learned(x, torch.ones_like(x), Gelu())
    assert ((value.double() - wanted) / wanted).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_far_out_it_is_nothing_or_the_identity_and_nan_stays(dtype):
    x = torch.zeros(gelu.WORTH_IT, dtype=dtype)
    x[:7] = torch.tensor([-math.inf, -1e30, -14, 14, 1e30, math.inf, math.nan])
    value, slope = learned(x, torch.ones_like(x), Gelu())
    assert value[:3].abs().max() < 1e-30
    assert torch.equal(value[3:6], x[3:6])
    assert slope[:6].tolist() == pytest.approx([0, 0, 0, 1, 1, 1], abs=1e-30 if dtype == torch.float32 else 0)
    assert value[6].isnan()
    assert torch.equal(value[7:], x[7:])
    assert slope[7:].unique().tolist() == pytest.approx([0.5], abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_numbers_of_threads_give_the_same_bits(dtype, threads, monkeypatch):
    monkeypatch.setattr(gelu, "WORTH_A_THREAD", 1)
    x, direction = drawn(4, 1031, dtype=dtype), drawn(4, 1031, dtype=dtype)
    made = []
    for number in (1, 2, 5):
        threads(number)
        assert is_compiled(Gelu(), x.clone().requires_grad_())
        made.append(learned(x, direction, Gelu()))
    assert all(torch.equal(a, b) for other in made[1:] for a, b in zip(made[0], other, strict=True))


def test_maps_with_channels_innermost_go_through_it():
    x = drawn(2, 64, 9, 9).to(memory_format=torch.channels_last).requires_grad_()
    found = MapGelu()(x)
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found, F.gelu(x), rtol=0, atol=2e-6)
    assert gelu.takes(x.permute(0, 2, 3, 1))


def test_torchs_is_taken_for_all_else(threads, monkeypatch):
    x = drawn(8, 1024).requires_grad_()
    assert gelu.takes(x)
    for other in (x.detach(), x.double(), x.half(), x.mT, x[:1, :99], x.to("meta")):
        assert not gelu.takes(other)
    with torch.no_grad():
        assert not gelu.takes(x)
    with FlopCounterMode(display=False):
        assert not gelu.takes(x)
    threads(2)
    monkeypatch.setattr(kernels, "PROCESS", -1)
    assert not gelu.takes(x)  # a fork, which has none of torch's threads
    threads(1)
    assert gelu.takes(x)
    monkeypatch.setattr(gelu, "kernel", None)
    assert not gelu.takes(x)
    torch.testing.assert_close(
        learned(x.detach(), x.detach(), Gelu())[1], learned(x.detach(), x.detach(), F.gelu)[1]
    )


def test_a_second_derivative_is_refused():
    x = drawn(8, 1024).requires_grad_()
    (slope,) = torch.autograd.grad(Gelu()(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()
