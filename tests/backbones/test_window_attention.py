"""Attention within windows against its equation token by token, and the merging of patches."""

import pytest
import torch
from torch import nn

from nestling.backbones.swin import PatchMerging
from nestling.backbones.symbolic_windows import cut_grid
from nestling.backbones.window_attention import WindowAttention
from nestling.backbones.windows import Windows, token_places


def attention_as_written(layer: WindowAttention, x: torch.Tensor) -> torch.Tensor:
    """Equation 4, token by token: each sees the real tokens of its window that lie beside it on the grid."""
    (height, width), size, heads = x.shape[1:3], layer.window, layer.num_heads
    shift = [size // 2 if layer.shifted and side > size else 0 for side in (height, width)]
    out = torch.zeros_like(x)

    def window_of(place: tuple[int, int]) -> tuple[int, int]:
        return (place[0] + size - shift[0]) // size, (place[1] + size - shift[1]) // size

    places = [(row, column) for row in range(height) for column in range(width)]
    for row, column in places:
        seen = [place for place in places if window_of(place) == window_of((row, column))]
        q = layer.qkv(x[:, row, column]).chunk(3, dim=-1)[0].unflatten(-1, (heads, -1))  # B H D
        keys, values = zip(*(layer.qkv(x[:, y, z]).chunk(3, dim=-1)[1:] for y, z in seen), strict=True)
        k, v = (torch.stack(t, 1).unflatten(-1, (heads, -1)) for t in (keys, values))  # B S H D
        logits = torch.einsum("bhd,bshd->bhs", q, k) / q.shape[-1] ** 0.5
        if layer.relative_position_bias_table is not None:
            table = layer.relative_position_bias_table.view(2 * size - 1, 2 * size - 1, heads)
            offsets = [(row - y + size - 1, column - z + size - 1) for y, z in seen]
            logits = logits + torch.stack([table[offset] for offset in offsets], dim=-1)
        weights = logits.softmax(dim=-1)
        out[:, row, column] = layer.proj(torch.einsum("bhs,bshd->bhd", weights, v).flatten(1))
    return out


@torch.no_grad()
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("grid", [(6, 6), (7, 5), (2, 2), (2, 7), (3, 4), (1, 1)])
def test_masked_attention_equals_its_equation_among_real_tokens(grid, relative, shifted):
    torch.manual_seed(0)
    layer = WindowAttention(8, 2, 3, shifted, masked=True, relative=relative).double()
    if relative:
        layer.relative_position_bias_table.normal_()
    x = torch.randn(2, *grid, 8).double()
    torch.testing.assert_close(layer(x), attention_as_written(layer, x), rtol=0, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("grid", [(2, 3), (4, 4), (1, 5)])
def test_a_grid_below_the_window_is_plain_attention_with_the_tables_bias(grid):
    torch.manual_seed(0)
    layer = WindowAttention(8, 2, 5, shifted=True).double()
    layer.relative_position_bias_table.normal_()
    x = torch.randn(2, *grid, 8).double()
    q, k, v = layer.qkv(x.flatten(1, 2)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    rows, columns = torch.meshgrid(*(torch.arange(side) for side in grid), indexing="ij")
    row, column = rows.flatten(), columns.flatten()
    bias = layer.relative_position_bias_table.view(9, 9, 2)[
        row[:, None] - row + 4, column[:, None] - column + 4
    ]
    weights = torch.softmax(q @ k.mT / 2 + bias.permute(2, 0, 1), dim=-1)
    expected = layer.proj((weights @ v).transpose(1, 2).flatten(2)).unflatten(1, grid)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("shifted", [False, True])
def test_real_tokens_see_nothing_of_padded_places_unless_padding_is_attended(shifted, masked):
    torch.manual_seed(0)
    layer = WindowAttention(8, 2, 3, shifted, masked)
    x, padded = torch.randn(1, 7, 5, 8), torch.randn(1, 9, 6, 8)
    padded[:, :7, :5] = x

    class Filled(Windows):
        """Its padding holds numbers instead of zeros."""

        def cut(self, x: torch.Tensor) -> torch.Tensor:
            row, column = token_places(self, x.device)
            return padded[:, row, column].unflatten(2, self.size).unflatten(1, (3, 2)).transpose(2, 3)

    filled = layer.within(Filled(*cut_grid((7, 5), 3, shifted, masked)), x)
    assert torch.allclose(filled, layer(x), atol=1e-6) == masked
    assert filled.isfinite().all()


@torch.no_grad()
def test_patch_merging_puts_two_by_two_tokens_side_by_side_columns_before_rows():
    layer = PatchMerging(1)
    layer.norm, layer.reduction = nn.Identity(), nn.Identity()
    x = torch.arange(1.0, 7.0).view(1, 2, 3, 1)  # 1 2 3 over 4 5 6
    assert layer(x).tolist() == [[[[1, 4, 2, 5], [3, 6, 0, 0]]]]
    assert layer(x[:, :1]).tolist() == [[[[1, 0, 2, 0], [3, 0, 0, 0]]]]
