"""Activation checkpointing: the same gradients and running statistics for less memory."""

import copy

import pytest
import torch
from torch import nn

from nestling import backbones
from nestling.backbones.adapters.blocks import blocks_of
from nestling.backbones.checkpointing import checkpointed

ADAPTED = {
    "timm:test_vit": {"drop_path": 0.3},
    "timm:vit_small_patch16_dinov3": {"embed_dim": 32, "depth": 2, "num_heads": 2, "drop_path": 0.3},
    "timm:xcit_nano_12_p16_224": {"embed_dim": 32, "depth": 2, "num_heads": 2, "drop_path": 0.3},
    "timm:resnet10t": {"drop_path": 0.3},
    "torchvision:resnet18": {},
    "torchvision:shufflenet_v2_x0_5": {},
}


class Block(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Dropout(0.5), nn.Conv2d(3, 3, 1)
        )


def step(model, run, images):
    torch.manual_seed(3)
    output = run(model, images)
    output.square().sum().backward()
    return output


def test_a_block_gives_the_same_gradients_and_moves_its_running_statistics_once():
    torch.manual_seed(0)
    plain, images = Block(), torch.randn(4, 3, 8, 8)
    twin = copy.deepcopy(plain)
    expected = step(plain, lambda block, x: block(x), images)
    found = step(twin, checkpointed, images)
    assert torch.equal(found, expected)
    for p, q in zip(plain.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    assert torch.equal(plain[1].running_mean, twin[1].running_mean)
    assert torch.equal(plain[1].running_var, twin[1].running_var)
    assert twin[1].num_batches_tracked == plain[1].num_batches_tracked == 1
    assert twin[1].momentum == 0.1


def test_activations_inside_a_block_are_not_kept():
    def kept(run):
        block, sizes = Block(), []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
            run(block, torch.randn(4, 3, 8, 8))
        return sum(size for size in sizes if size >= 4 * 3 * 8 * 8)

    assert kept(lambda block, x: block(x)) >= 3 * 768
    assert kept(checkpointed) <= 768


@pytest.mark.parametrize("momentum", [None, 0.3])
def test_a_cumulative_average_counts_a_batch_once(momentum):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.BatchNorm2d(3, momentum=momentum), nn.BatchNorm2d(3, track_running_stats=False))
    twin = copy.deepcopy(plain)
    for _ in range(3):
        images = torch.randn(4, 3, 2, 2)
        step(plain, lambda block, x: block(x), images)
        step(twin, checkpointed, images)
    assert torch.equal(plain[0].running_mean, twin[0].running_mean)
    assert twin[0].num_batches_tracked == 3
    assert twin[0].momentum == momentum


@pytest.mark.parametrize("name", ADAPTED)
def test_an_adapted_network_gives_the_same_gradients_and_running_statistics(name):
    torch.manual_seed(0)
    plain = backbones.create(name, **ADAPTED[name]).train()
    twin = copy.deepcopy(plain)
    twin.activation_checkpointing = True
    images = torch.randn(2, 3, 64, 96)
    expected = step(plain, lambda model, x: model(x).patches, images)
    found = step(twin, lambda model, x: model(x).patches, images)
    assert torch.equal(found, expected)
    gradients = {key: p.grad for key, p in plain.named_parameters()}
    for key, parameter in twin.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[key], rtol=0, atol=0, msg=key)
    buffers = dict(plain.named_buffers())
    assert all(torch.equal(buffer, buffers[key]) for key, buffer in twin.named_buffers())
    assert all("forward" not in vars(module) for module in twin.modules())


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("timm:vit_small_patch16_224", {"Block": 12}),
        ("timm:swin_tiny_patch4_window7_224", {"SwinTransformerBlock": 12}),
        ("timm:convnext_atto", {"ConvNeXtBlock": 12}),
        ("timm:regnetx_002", {"Bottleneck": 11}),  # of 13: two stages of one block are no lists
        ("torchvision:resnet18", {"BasicBlock": 8}),
        ("torchvision:swin_t", {"SwinTransformerBlock": 12, "PatchMerging": 0}),
        ("torchvision:efficientnet_b0", {"MBConv": 16}),
        ("torchvision:densenet121", {"_DenseLayer": 58}),
    ],
)
def test_the_blocks_of_a_foreign_network_are_found(name, blocks):
    with torch.device("meta"):
        found = [type(block).__name__ for block in blocks_of(backbones.create(name).model)]
    assert {kind: found.count(kind) for kind in blocks} == blocks
    assert len(found) == sum(blocks.values())


def test_a_network_without_blocks_is_refused():
    with torch.device("meta"):
        model = backbones.create("torchvision:vgg11")
    with pytest.raises(ValueError, match="torchvision:vgg11 repeats no block"):
        model.activation_checkpointing = True
    assert not model.activation_checkpointing
