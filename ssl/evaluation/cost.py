"""What a backbone costs at a resolution: counted, not quoted.

    python -m nestling.ssl.evaluation.cost docs/backbones.md

writes the tables of that page anew between their marks.
"""

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from nestling import backbones
from nestling.backbones import Backbone
from nestling.ssl.pages import renew

COMPARED = ("vit_small_p16", "xcit_small_12_p16", "swin_tiny_w7", "vit_small_p8", "xcit_small_12_p8")
SIDES = (96, 224, 384, 512, 768, 1024)


def on_meta(name: str, **options: Any) -> Backbone:
    """A backbone of shapes alone: it takes no memory and computes nothing."""
    with torch.device("meta"):
        return backbones.create(name, **options).eval()


def multiply_adds(backbone: nn.Module, height: int, width: int, in_chans: int = 3) -> int:
    """Multiply-adds of one image's forward pass in matrix products, convolutions and attention.

    Normalisation, activations and sums are left out, as is usual. Counted on shapes alone: torch's
    counter does not see the fused attention of the CPU.
    """
    network = copy.deepcopy(backbone).to("meta").requires_grad_(False)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(torch.empty(1, in_chans, height, width, device="meta"))
    return counter.get_total_flops() // 2  # it counts a multiply-add as two operations


def cost_table(names: Sequence[str] = COMPARED, sides: Sequence[int] = SIDES) -> str:
    """GMACs of square images, a row for each side and a column for each backbone, and how they grow."""
    networks = [on_meta(name) for name in names]
    counted = [[multiply_adds(network, side, side) for network in networks] for side in sides]
    lines = [
        f"| side | {' | '.join(f'`{name}`' for name in names)} |",
        f"| ---: |{' ---: |' * len(names)}",
        *(
            f"| {side} | {' | '.join(f'{count / 1e9:.2f}' for count in row)} |"
            for side, row in zip(sides, counted, strict=True)
        ),
    ]
    pixels = (sides[-1] / sides[1]) ** 2
    growth = [last / second for second, last in zip(counted[1], counted[-1], strict=True)]
    times = " | ".join(f"{factor:.1f} x" for factor in growth)
    return "\n".join([*lines, f"| {sides[1]} to {sides[-1]}: pixels {pixels:.1f} x | {times} |"])


def size_table() -> str:
    """Every registered name with its width, stride and number of parameters."""
    lines = ["| name | width | stride | parameters, millions |", "| --- | ---: | ---: | ---: |"]
    for name in backbones.names():
        network = on_meta(name)
        count = sum(parameter.numel() for parameter in network.parameters())
        lines.append(f"| `{name}` | {network.embed_dim} | {network.stride} | {count / 1e6:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    renew(page, "cost", cost_table())
    renew(page, "sizes", size_table())
