"""Layer-wise decay: the layer of each parameter in each family, and the rate that follows."""

import pytest
import torch
from torch import nn

from nestling import backbones
from nestling.ssl.evaluation.finetuning.layers import apply, block_names, layers_of, parameter_groups

TINY = {"embed_dim": 16, "depth": 2, "num_heads": 2}
EXPECTED = {
    ("vit_tiny_p16", "registers"): {
        **dict.fromkeys(("cls_token", "pos_embed", "register_tokens", "patch_embed.proj.weight"), 0),
        "blocks.0.attn.qkv.weight": 1,
        "blocks.1.mlp.fc2.bias": 2,
        "norm.weight": 3,
    },
    ("xcit_nano_12_p4", None): {
        "blocks.0.gamma1": 1,
        "blocks.1.attn.temperature": 2,
        "cls_token": 3,
        "cls_attn_blocks.0.attn.qkv.weight": 3,
        "cls_attn_blocks.1.norm1.weight": 4,
        "norm.bias": 5,
    },
    ("swin_tiny_w7", None): {  # 2, 2, 2 and 2 blocks
        "patch_embed.proj.weight": 0,
        "patch_embed.norm.weight": 0,
        "layers.0.blocks.1.attn.qkv.weight": 2,
        "layers.0.downsample.reduction.weight": 2,
        "layers.2.blocks.0.attn.relative_position_bias_table": 5,
        "layers.3.blocks.1.mlp.fc1.weight": 8,
        "norm.weight": 9,
    },
}


@pytest.mark.parametrize(("name", "option"), EXPECTED)
def test_a_layer_is_the_place_among_all_blocks_of_all_stages(name, option):
    layers = layers_of(backbones.create(name, **TINY, **({option: 1} if option else {})))
    expected = EXPECTED[name, option]
    assert {key: layers.get(key) for key in expected} == expected


def test_positions_and_stem_of_xcit_come_before_its_first_block():
    layers = layers_of(backbones.create("xcit_nano_12_p4", **TINY))
    before = {key for key, layer in layers.items() if layer == 0}
    assert {key.split(".")[0] for key in before} == {"patch_embed", "pos_embeder"}


def test_an_adapted_network_is_ordered_by_its_repeated_blocks():
    backbone = backbones.create("torchvision:resnet18")
    layers = layers_of(backbone)
    assert len(block_names(backbone)) == 8
    assert layers["model.conv1.weight"] == 0
    assert layers["model.layer1.0.conv1.weight"] == 1
    assert layers["model.layer4.1.conv2.weight"] == 8
    ordered = list(layers.values())
    assert ordered == sorted(ordered)


def test_the_rate_falls_by_the_decay_from_layer_to_layer_and_the_head_has_it_whole():
    network = nn.Module()
    network.backbone = backbones.create("xcit_nano_12_p4", **TINY)
    network.head = nn.Linear(16, 3)
    groups = parameter_groups(network, network.backbone, 0.5)
    apply(groups, 0.1, 0.05)
    rate = {id(p): (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(rate) == len(list(network.parameters()))

    def of(name):
        return rate[id(network.get_parameter(name))]

    assert of("head.weight") == (0.1, 0.05)
    assert of("head.bias") == (0.1, 0.0)
    assert of("backbone.norm.weight") == (0.1, 0.0)  # beside the head: after the last block
    assert of("backbone.cls_attn_blocks.1.mlp.fc1.weight") == (0.05, 0.05)
    assert of("backbone.blocks.0.attn.qkv.weight") == (0.1 * 0.5**4, 0.05)
    assert of("backbone.blocks.0.attn.temperature") == (0.1 * 0.5**4, 0.0)  # three dimensions, yet spared


def test_without_decay_all_layers_learn_alike():
    backbone = backbones.create("swin_tiny_w7", **TINY)
    groups = parameter_groups(backbone, backbone, 1.0)
    torch.optim.AdamW(groups, lr=0.0)
    assert {group["scale"] for group in groups} == {1.0}
