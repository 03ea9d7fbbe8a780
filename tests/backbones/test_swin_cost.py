"""What Swin costs, counted by torch: one multiply-add is two of its floating-point operations."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from nestling import backbones
from nestling.backbones.window_attention import WindowAttention


def multiply_adds(module: torch.nn.Module, x: torch.Tensor) -> float:
    # The counter doesn't know the fused kernel of the CPU; its steps one by one are the same products.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        module(x)
    return counter.get_total_flops() / 2


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize(("dim", "num_heads"), [(96, 3), (32, 1)])
@pytest.mark.parametrize(("window", "grid"), [(7, (7, 7)), (7, (28, 14)), (14, (14, 28)), (2, (6, 4))])
def test_a_layer_costs_what_the_paper_says(window, grid, dim, num_heads, shifted):
    tokens = grid[0] * grid[1]  # equation 2: 4 h w C^2 + 2 M^2 h w C
    counted = multiply_adds(WindowAttention(dim, num_heads, window, shifted), torch.randn(1, *grid, dim))
    assert counted == 4 * tokens * dim**2 + 2 * window**2 * tokens * dim


@pytest.mark.parametrize("grid", [(3, 5), (2, 7), (1, 1)])
def test_a_grid_within_one_window_pays_for_no_padding(grid):
    tokens = grid[0] * grid[1]
    counted = multiply_adds(WindowAttention(32, 2, 7), torch.randn(1, *grid, 32))
    assert counted == 4 * tokens * 32**2 + 2 * tokens**2 * 32


@pytest.mark.parametrize("scale", [1, 2])
def test_a_network_costs_its_four_stages_and_grows_with_the_number_of_pixels(scale):
    dim, depth, window, side = 16, 3, 2, 64 * scale
    model = backbones.create("swin_tiny_w7", embed_dim=dim, depth=depth, num_heads=1, window=window).eval()
    counted = multiply_adds(model, torch.randn(1, 3, side, side))
    tokens = (side // 4) ** 2
    expected = tokens * 3 * 4**2 * dim
    for stage, blocks in enumerate([2, 2, depth, 2]):
        expected += blocks * (12 * tokens * dim**2 + 2 * window**2 * tokens * dim)
        if stage < 3:
            expected += tokens // 4 * 8 * dim**2
            tokens, dim = tokens // 4, 2 * dim
    assert counted == expected
