"""Layer-wise learning rates: the further a parameter is from the head, the less it learns.

lr(layer) = lr * decay^(top - layer) (Clark et al., 2020, ELECTRA; for images Bao et al., 2022, BEiT).
"""

from bisect import bisect_right
from typing import Any

from torch import Tensor, nn

from nestling.backbones import Backbone
from nestling.backbones.adapters.blocks import blocks_of
from nestling.ssl.optim import is_spared

FIRST_CLASS_BLOCK = "cls_attn_blocks.0"  # XCiT's class token enters there, not with the patches


def block_names(backbone: nn.Module) -> list[str]:
    """The residual blocks from the first to the last: of all stages in a row, XCiT's class attention too."""
    inside = set(map(id, blocks_of(backbone)))
    return [name for name, module in backbone.named_modules() if id(module) in inside]


def layers_of(backbone: nn.Module) -> dict[str, int]:
    """The layer of each parameter: i in the i-th of L blocks, 0 before the first, L + 1 after the last.

    What stands between two blocks, such as Swin's merging, belongs to the one before it. A network that
    repeats no block is one layer, 0.
    """
    blocks, names = block_names(backbone), [name for name, _ in backbone.named_parameters()]
    place = {name: number for number, name in enumerate(names)}
    members = [[name for name in names if name.startswith(f"{block}.")] for block in blocks]
    starts = [min(place[name] for name in group) for group in members]
    inside = {name: number for number, group in enumerate(members, start=1) for name in group}
    last = max((place[name] for name in members[-1]), default=0) if members else len(names)
    layers = {
        name: inside.get(name, len(blocks) + 1 if place[name] > last else bisect_right(starts, place[name]))
        for name in names
    }
    if "cls_token" in layers and FIRST_CLASS_BLOCK in blocks:
        layers["cls_token"] = blocks.index(FIRST_CLASS_BLOCK) + 1
    return layers


def parameter_groups(network: nn.Module, backbone: Backbone, decay: float) -> list[dict[str, Any]]:
    """A group for each layer, decayed and spared apart; `scale` is its share of the learning rate.

    `backbone` is a part of `network`; what else is trained, the head, learns at the full rate.
    """
    (prefix,) = (name for name, module in network.named_modules() if module is backbone)
    prefix = f"{prefix}." if prefix else ""
    layers = {prefix + name: layer for name, layer in layers_of(backbone).items()}
    listed = {prefix + name for name in backbone.no_weight_decay()}
    top = len(block_names(backbone)) + 1
    groups: dict[tuple[int, bool], list[Tensor]] = {}
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            layer = layers.get(name, top)
            groups.setdefault((layer, not is_spared(name, parameter, listed)), []).append(parameter)
    return [
        {"params": parameters, "decays": decays, "scale": decay ** (top - layer)}
        for (layer, decays), parameters in sorted(groups.items(), key=lambda item: item[0])
    ]


def apply(groups: list[dict[str, Any]], lr: float, weight_decay: float) -> None:
    """Write a step's learning rate and weight decay into the groups of an optimizer."""
    for group in groups:
        group["lr"] = lr * group["scale"]
        group["weight_decay"] = weight_decay if group["decays"] else 0.0
