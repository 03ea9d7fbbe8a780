"""What XCiT's attention costs, counted by torch: one multiply-add is two of its floating-point operations."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nestling.backbones.xcit import XCA


@pytest.mark.parametrize("tokens", [16, 196, 784])
@pytest.mark.parametrize(("dim", "num_heads"), [(96, 3), (128, 4), (64, 1)])
def test_cross_covariance_attention_is_linear_in_the_tokens(tokens, dim, num_heads):
    """Section 3.2: O(N d^2 / h) for both products, and four projections of N d^2."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        XCA(dim, num_heads)(torch.randn(1, tokens, dim))
    assert counter.get_total_flops() / 2 == 4 * tokens * dim**2 + 2 * tokens * dim**2 // num_heads
