"""The counted cost of a backbone, and the page that shows it."""

from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from nestling import backbones
from nestling.backbones import window_attention
from nestling.ssl.evaluation.cost import cost_table, multiply_adds, on_meta, size_table
from nestling.ssl.pages import renewed

PAGE = Path(__file__).parents[3] / "docs" / "backbones.md"


@pytest.mark.parametrize("name", ["vit_tiny_p16", "xcit_nano_12_p16", "swin_tiny_w7"])
def test_counting_shapes_alone_equals_counting_a_real_forward_with_plain_attention(name, monkeypatch):
    monkeypatch.setattr(window_attention, "can_gather", lambda x: False)  # which computes nothing for padding
    real = backbones.create(name, embed_dim=64, depth=2, num_heads=2).eval().requires_grad_(False)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        real(torch.zeros(1, 3, 64, 96))
    assert multiply_adds(real, 64, 96) == counter.get_total_flops() / 2 > 0


def test_a_linear_layer_of_known_size_is_counted_exactly():
    class Projection(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(7, 11)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.linear(images)

    assert multiply_adds(Projection(), 5, 7) == 3 * 5 * 7 * 11


@pytest.mark.slow
@pytest.mark.parametrize(("name", "table"), [("cost", cost_table), ("sizes", size_table)])
def test_the_page_on_backbones_shows_what_is_counted(name, table):
    text = PAGE.read_text(encoding="utf-8")
    assert text == renewed(text, name, table()), (
        f"run: python -m nestling.ssl.evaluation.cost docs/{PAGE.name}"
    )


def test_doubling_the_side_quadruples_xcit_and_swin_and_more_than_quadruples_vit():
    def growth(name: str) -> float:
        network = on_meta(name, depth=2)
        return multiply_adds(network, 896, 896) / multiply_adds(network, 448, 448)

    assert growth("xcit_small_12_p16") == pytest.approx(4, rel=0.01)
    assert growth("swin_tiny_w7") == pytest.approx(4, rel=0.01)
    assert growth("vit_small_p16") > 5
