"""What ViT costs, counted by torch: one multiply-add is two of its floating-point operations."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from nestling import backbones
from nestling.backbones.self_attention import Attention


def multiply_adds(module: torch.nn.Module, *inputs: torch.Tensor) -> float:
    # The counter doesn't know the fused kernel of the CPU; its steps one by one are the same products.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        module(*inputs)
    return counter.get_total_flops() / 2


@pytest.mark.parametrize("grid", [(14, 14), (7, 7), (28, 28), (6, 12)])
@pytest.mark.parametrize(("dim", "num_heads"), [(96, 3), (192, 3), (64, 1)])
def test_attention_costs_what_the_swin_paper_says(grid, dim, num_heads):
    tokens = grid[0] * grid[1]  # equation 1: 4 h w C^2 + 2 (h w)^2 C, without a class token
    counted = multiply_adds(Attention(dim, num_heads, qkv_bias=True), torch.randn(1, tokens, dim))
    assert counted == 4 * tokens * dim**2 + 2 * tokens**2 * dim


@pytest.mark.parametrize("grid", [(6, 6), (4, 9)])
def test_a_network_costs_its_patches_and_its_blocks_with_the_class_token_counted_in(grid):
    dim, depth, patch = 96, 2, 16
    model = backbones.create("vit_tiny_p16", embed_dim=dim, depth=depth, num_heads=3, position_size=96).eval()
    counted = multiply_adds(model, torch.randn(1, 3, grid[0] * patch, grid[1] * patch))
    patches = grid[0] * grid[1]
    tokens = patches + 1
    attention, ffn = 4 * tokens * dim**2 + 2 * tokens**2 * dim, 8 * tokens * dim**2
    side = 96 // patch
    resize = 0 if grid == (side, side) else grid[0] * side * side * dim + patches * side * dim
    assert counted == patches * 3 * patch**2 * dim + depth * (attention + ffn) + resize
