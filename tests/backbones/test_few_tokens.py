"""Attention among few tokens against torch's, its gradient against numbers, and where it is used."""

import pytest
import torch
import torch.nn.functional as F

from nestling.backbones import few_tokens
from nestling.backbones.few_tokens import FewTokens
from nestling.backbones.self_attention import Attention, by_head

B, T, H, D = 2, 5, 3, 4


def inputs(tokens=T, dtype=torch.float64):
    torch.manual_seed(0)
    return torch.randn(B, tokens, 3, H, D, dtype=dtype).requires_grad_()


def torchs(qkv):
    return F.scaled_dot_product_attention(*by_head(qkv, None)).transpose(1, 2).flatten(2)


def test_values_and_gradients_are_torchs():
    found, expected = inputs(), inputs()
    ours, theirs = FewTokens.apply(found), torchs(expected)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    direction = torch.randn_like(theirs)
    for outputs in (ours, theirs):
        (outputs * direction).sum().backward()
    torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=1e-12)


def test_gradients_are_those_of_finite_differences():
    assert torch.autograd.gradcheck(FewTokens.apply, inputs())


def test_it_trains_on_few_tokens_and_leaves_the_rest_to_torch():
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert few_tokens.takes(inputs(few_tokens.LONGEST, dtype))
        assert not few_tokens.takes(inputs(few_tokens.LONGEST + 1, dtype))
    assert not few_tokens.takes(inputs(dtype=torch.float16))
    assert not few_tokens.takes(inputs().detach())
    with torch.no_grad():
        assert not few_tokens.takes(inputs())


@pytest.mark.parametrize("spread", [1, 3])  # of larger scores the rounding weighs more
def test_in_bf16_values_and_gradients_are_as_near_to_exact_ones_as_torchs(spread):
    torch.manual_seed(0)
    given, direction = torch.randn(2, 50, 3, 2, 64) * spread, torch.randn(2, 50, 128).bfloat16()
    given = given.bfloat16()

    def computed(function, dtype):
        qkv = given.to(dtype).requires_grad_()
        output = function(qkv)
        output.backward(direction.to(dtype))
        return output.detach().double(), *qkv.grad.double().unbind(dim=2)

    exact = computed(torchs, torch.float64)
    for ours, theirs, wanted in zip(
        computed(FewTokens.apply, torch.bfloat16), computed(torchs, torch.bfloat16), exact, strict=True
    ):
        assert (ours - wanted).norm() < 1.5 * (theirs - wanted).norm()
        assert (ours - wanted).norm() < 6e-3 * wanted.norm()


def test_autocast_leaves_scores_in_full_precision():
    given = inputs(dtype=torch.bfloat16)
    expected = FewTokens.apply(given)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(FewTokens.apply(given), expected, rtol=0, atol=0)


def test_attention_of_a_block_uses_it_and_is_the_same_without(monkeypatch):
    torch.manual_seed(0)
    attention, x = Attention(12, num_heads=3, qkv_bias=True).double(), torch.randn(2, 7, 12).double()
    applied = []
    takes = few_tokens.takes
    monkeypatch.setattr(few_tokens, "takes", lambda qkv: applied.append(takes(qkv)) or applied[-1])

    def trained():
        attention.zero_grad()
        output = attention(x)
        output.square().sum().backward()
        return [output.detach(), *(parameter.grad for parameter in attention.parameters())]

    ours = trained()
    assert applied == [True]
    monkeypatch.setattr(few_tokens, "takes", lambda qkv: False)
    for one, other in zip(ours, trained(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_a_second_derivative_is_refused_as_by_torchs():
    for function in (FewTokens.apply, torchs):
        qkv = inputs()
        (gradient,) = torch.autograd.grad(function(qkv).square().sum(), qkv, create_graph=True)
        with pytest.raises(RuntimeError, match=r"differentiable|derivative"):
            gradient.sum().backward()
