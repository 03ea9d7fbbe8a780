"""The image-level vector alone: what `forward` calls `cls`, for less."""

import copy

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nestling import backbones
from nestling.backbones.xcit import XCiT

SMALL = {"embed_dim": 32, "depth": 3, "num_heads": 2}
NETWORKS = {
    "xcit_tiny_12_p8": SMALL,
    "xcit_nano_12_p8": {**SMALL, "cls_depth": 1},
    "vit_tiny_p8": {**SMALL, "position_size": 32},
    "vit_small_p8": {**SMALL, "position": "rope", "registers": 2, "layer_scale": 0.5, "qkv_bias": False},
    "vit_base_p8": {**SMALL, "position": "none", "registers": 2, "qkv_bias": False, "ffn": "swiglu"},
    "swin_tiny_w7": {"embed_dim": 16, "depth": 4, "num_heads": 1},
}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_it_is_the_cls_of_features_with_the_same_gradients_and_statistics(name, checkpointing):
    torch.manual_seed(0)
    whole = backbones.create(name, drop_path=0.3, **NETWORKS[name]).double().train()
    alone = copy.deepcopy(whole)
    alone.activation_checkpointing = checkpointing
    images, direction = torch.randn(4, 3, 32, 48).double(), torch.randn(whole.embed_dim).double()
    found = []
    for vectors in (lambda: whole(images).cls, lambda: alone.image_vectors(images)):
        torch.manual_seed(1)
        found.append(vectors())
        (found[-1] @ direction).sum().backward()
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-10)
    for (key, parameter), other in zip(whole.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad, rtol=0, atol=1e-10, msg=key)
    for (key, buffer), other in zip(whole.named_buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(other, buffer, rtol=0, atol=1e-12, msg=key)


@pytest.mark.parametrize("name", ["xcit_tiny_12_p8", "vit_tiny_p8"])
def test_a_last_block_costs_next_to_nothing_for_it(name):
    """One block's query, key, value and feed-forward network are T C^2 each or more, for T tokens."""
    backbone = backbones.create(name, **NETWORKS[name]).eval()
    last = (backbone.cls_attn_blocks if name.startswith("xcit") else backbone.blocks)[-1]
    tokens = torch.randn(1, 65, 32)
    inputs = (tokens[:, :1], tokens[:, 1:]) if name.startswith("xcit") else (tokens, None)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        last(*inputs, True)
    dim, num_heads = 32, 2
    assert counter.get_total_flops() / 2 == 12 * dim**2 + 2 * 65 * num_heads * dim


def test_a_class_with_a_forward_of_its_own_is_asked_for_its_own_vectors():
    class Doubled(XCiT):
        def forward(self, images, mask=None):
            features = super().forward(images, mask)
            return backbones.Features(2 * features.cls, features.patches, features.grid)

    network = Doubled("doubled", patch=8, **SMALL).eval()
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(network.image_vectors(images), network(images).cls)
