"""XCiT's layers: cross-covariance attention, local patch interaction, class attention."""

import pytest
import torch
from tiny_xcit import tiny
from torch import nn

from nestling.backbones.class_attention import ClassAttention
from nestling.backbones.xcit import LPI, XCA


def xca_as_written(layer: XCA, x: torch.Tensor) -> torch.Tensor:
    """Equation 3, one image and one head after the other."""
    images = []
    for tokens in x:
        q, k, v = layer.qkv(tokens).chunk(3, dim=-1)  # each N C
        width = q.shape[1] // layer.num_heads
        heads = []
        for head in range(layer.num_heads):
            own = slice(head * width, (head + 1) * width)
            q_hat, k_hat = (y[:, own] / y[:, own].norm(dim=0, keepdim=True) for y in (q, k))
            mixing = torch.softmax(layer.temperature[head] * k_hat.T @ q_hat, dim=0)
            heads.append(v[:, own] @ mixing)
        images.append(layer.proj(torch.cat(heads, dim=-1)))
    return torch.stack(images)


def test_xca_equals_its_equation():
    torch.manual_seed(0)
    layer = XCA(24, 3).double()
    with torch.no_grad():
        layer.temperature.copy_(torch.tensor([0.5, 2.0, 9.0])[:, None, None])
    x = torch.randn(2, 7, 24).double()
    torch.testing.assert_close(layer(x), xca_as_written(layer, x), rtol=0, atol=1e-12)


@torch.no_grad()
def test_heads_of_xca_are_block_diagonal():
    torch.manual_seed(0)
    layer = XCA(24, 3)
    layer.proj = nn.Identity()
    x = torch.randn(1, 7, 24)
    before = layer(x).unflatten(-1, (3, 8))
    layer.qkv.weight.view(3, 3, 8, 24)[:, 1] += 1.0  # query, key and value of the second head
    after = layer(x).unflatten(-1, (3, 8))
    assert torch.equal(before[:, :, [0, 2]], after[:, :, [0, 2]])
    assert not torch.allclose(before[:, :, 1], after[:, :, 1])


def test_xca_of_queries_that_are_all_zero_is_finite_with_finite_gradients():
    layer = XCA(8, 2)
    nn.init.zeros_(layer.qkv.bias)
    layer(torch.zeros(2, 5, 8)).sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


def test_xca_keeps_half_precision_in_range():
    layer = XCA(16, 2).half()
    with torch.no_grad():
        layer.qkv.weight.fill_(0.5)
    assert layer(torch.full((1, 4096, 16), 4.0).half()).isfinite().all()  # raw q k^T would be 4e6


@torch.no_grad()
def test_lpi_reaches_two_patches_and_only_within_its_channel():
    torch.manual_seed(0)
    layer = LPI(4).eval()
    x = torch.randn(1, 63, 4)
    moved = x.clone()
    moved[0, 3 * 9 + 4, 2] += 1.0  # row 3, column 4 of a 7 x 9 grid
    change = (layer(moved, (7, 9)) - layer(x, (7, 9))).abs().view(7, 9, 4) > 1e-7
    expected = torch.zeros(7, 9, 4, dtype=torch.bool)
    expected[1:6, 2:7, 2] = True
    assert torch.equal(change, expected)


@torch.no_grad()
def test_attention_maps_are_what_the_class_token_averages_with():
    torch.manual_seed(0)
    layer = ClassAttention(24, 3).double()
    tokens = torch.randn(2, 8, 24).double()
    q, k, v = layer.qkv(tokens).unflatten(-1, (3, 3, 8)).unbind(2)  # each B 1+N H D
    weights = torch.softmax(torch.einsum("bhd,bnhd->bhn", q[:, 0], k) / 8**0.5, dim=-1)
    torch.testing.assert_close(layer.attention(tokens), weights)
    expected = layer.proj(torch.einsum("bhn,bnhd->bhd", weights, v).flatten(1))
    torch.testing.assert_close(layer(tokens).squeeze(1), expected)


@torch.no_grad()
@pytest.mark.parametrize("cls_depth", [1, 2, 3])
def test_attention_over_patches_sums_to_less_than_one_and_is_the_last_layers(cls_depth):
    model = tiny(cls_depth=cls_depth).eval()
    seen = []
    model.cls_attn_blocks[-1].attn.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    images = torch.randn(2, 3, 20, 28)
    maps = model.attention(images)
    model(images)
    assert maps.shape == (2, 4, 5, 7)
    share = maps.sum((-2, -1))
    assert (share > 0).all()
    assert (share < 1).all()
    expected = model.cls_attn_blocks[-1].attn.attention(seen[-1])
    torch.testing.assert_close(maps.flatten(2), expected[..., 1:])
    torch.testing.assert_close(share + expected[..., 0], torch.ones_like(share))
