"""Attention by gathered rows against the same windows cut, padded and rolled: values and gradients."""

import pytest
import torch

from nestling.backbones.symbolic_windows import cut_grid
from nestling.backbones.window_attention import WindowAttention


def with_gradients(layer, run, windows, x):
    """The result and the gradients of a random direction with respect to the input and all parameters."""
    x = x.clone().requires_grad_()
    out = run(windows, x)
    direction = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    return [out, *torch.autograd.grad((out * direction).sum(), [x, *layer.parameters()])]


def gathered(layer):
    """The way of a CPU, for windows that the layer finds itself."""
    return lambda _, x: layer.proj(layer.gathered(layer.qkv(x)))


@pytest.mark.parametrize(("relative", "qkv_bias"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("grid", [(6, 6), (7, 5), (2, 2), (2, 7), (3, 4), (1, 1)])
def test_values_and_gradients_equal_those_of_cut_windows(grid, masked, shifted, relative, qkv_bias):
    torch.manual_seed(0)
    layer = WindowAttention(8, 2, 3, shifted, masked, relative, qkv_bias).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    windows, x = cut_grid(grid, 3, shifted, masked), torch.randn(2, *grid, 8).double()
    found = with_gradients(layer, gathered(layer), windows, x)
    expected = with_gradients(layer, layer.within, windows, x)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize("masked", [False, True])
def test_in_bf16_values_and_gradients_are_as_near_to_exact_ones_as_those_of_cut_windows(masked):
    torch.manual_seed(0)
    layer = WindowAttention(64, 2, 7, shifted=True, masked=masked).bfloat16()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(8)
    windows, x = cut_grid((10, 13), 7, True, masked), torch.randn(2, 10, 13, 64).bfloat16()
    ours, theirs = (with_gradients(layer, run, windows, x) for run in (gathered(layer), layer.within))
    exact = with_gradients(layer.double(), layer.within, windows, x.double())
    for one, other, wanted in zip(ours, theirs, exact, strict=True):
        assert one.dtype == torch.bfloat16
        wanted = wanted.double()
        assert (one - wanted).norm() < max(1.2 * (other - wanted).norm(), 4e-3 * wanted.norm())


def test_autocast_keeps_the_softmax_in_full_precision_and_gives_gradients_of_the_inputs_type():
    torch.manual_seed(0)
    layer, x = WindowAttention(32, 2, 3, shifted=True), torch.randn(2, 7, 5, 32, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    out.float().square().sum().backward()
    assert (out.dtype, x.grad.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(out.float(), layer(x), rtol=0, atol=0.01)


def test_a_second_derivative_is_refused():
    layer, x = WindowAttention(8, 2, 3), torch.randn(1, 6, 6, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
