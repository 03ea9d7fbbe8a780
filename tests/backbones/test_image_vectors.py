"""The image-level vector alone: what `forward` calls `cls`, for less."""

import copy
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nestling import backbones
from nestling.backbones.layers import DropPath
from nestling.backbones.packing import unpack
from nestling.backbones.xcit import XCiT

SMALL = {"embed_dim": 32, "depth": 3, "num_heads": 2}
NETWORKS = {
    "xcit_tiny_12_p8": SMALL,
    "xcit_nano_12_p8": {**SMALL, "cls_depth": 1},
    "vit_tiny_p8": {**SMALL, "position_size": 32},
    "vit_small_p8": {**SMALL, "position": "rope", "registers": 2, "layer_scale": 0.5, "qkv_bias": False},
    "vit_base_p8": {**SMALL, "position": "none", "registers": 2, "qkv_bias": False, "ffn": "swiglu"},
    "swin_tiny_w7": {"embed_dim": 16, "depth": 4, "num_heads": 1},
    "swin_small_w7": {"embed_dim": 8, "depth": 2, "num_heads": 1, "padding": "attended", "position": "both"},
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


VIEWS = ((4, 32, 48), (6, 16, 16), (2, 24, 8))  # images, height, width


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_several_sizes_together_give_what_they_give_apart(name, checkpointing):
    torch.manual_seed(0)
    together = backbones.create(name, **NETWORKS[name]).double().train()
    together.activation_checkpointing = checkpointing
    apart = copy.deepcopy(together)
    views = [torch.randn(images, 3, *size).double() for images, *size in VIEWS]
    direction = torch.randn(together.embed_dim).double()
    found, expected = together.view_vectors(views), [apart.image_vectors(images) for images in views]
    for vectors in (found, expected):
        (torch.cat(vectors) @ direction).square().sum().backward()
    for ours, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-10)
    for (key, parameter), other in zip(together.named_parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-10, atol=1e-8, msg=key)
    for (key, buffer), other in zip(together.named_buffers(), apart.buffers(), strict=True):
        torch.testing.assert_close(buffer, other, rtol=0, atol=1e-12, msg=key)


@pytest.mark.parametrize("name", NETWORKS)
def test_under_autocast_sizes_together_are_as_near_to_float64_as_apart(name):
    torch.manual_seed(0)
    backbone = backbones.create(name, **NETWORKS[name]).eval()
    views = [torch.randn(images, 3, *size) for images, *size in VIEWS]
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            together = torch.cat(backbone.view_vectors(views)).double()
            apart = torch.cat([backbone.image_vectors(images) for images in views]).double()
        backbone.double()
        exact = torch.cat([backbone.image_vectors(images.double()) for images in views])
    error = (apart - exact).norm()
    assert 0 < error < 0.05 * exact.norm()
    assert (together - exact).norm() <= 1.1 * error


def first_block(backbone):
    return backbone.layers[0].blocks[0] if backbone.name.startswith("swin") else backbone.blocks[0]


@pytest.mark.parametrize("name", ["xcit_tiny_12_p8", "vit_tiny_p8", "swin_tiny_w7"])
def test_blocks_are_called_once_for_all_sizes(name):
    backbone, calls = backbones.create(name, **NETWORKS[name]), []
    first_block(backbone).register_forward_hook(lambda *_: calls.append(1))
    backbone.view_vectors([torch.randn(images, 3, *size) for images, *size in VIEWS])
    assert calls == [1]


@pytest.mark.parametrize(
    ("name", "branches", "width"),
    [("xcit_tiny_12_p8", 3, 32), ("vit_tiny_p8", 2, 32), ("swin_tiny_w7", 2, 16)],
)
def test_paths_are_dropped_for_whole_images_of_all_sizes(name, branches, width):
    """A dropped branch adds nothing, else it is scaled by 1 / (1 - rate)."""
    torch.manual_seed(0)
    block = first_block(backbones.create(name, **NETWORKS[name])).train()
    block.drop_path = DropPath(0.5)
    grids = [(height // 8, width // 8) for _, height, width in VIEWS]
    sizes = tuple((images, *grid) for (images, *_), grid in zip(VIEWS, grids, strict=True))
    x = torch.randn(sum(map(math.prod, sizes)), width)

    torch.manual_seed(1)
    factors = [unpack(block.drop_path(x, sizes), sizes) for _ in range(branches)]
    of_images = [part.unique().tolist() for branch in factors for size in branch for part in size]
    assert sorted({factor for (factor,) in of_images}) == [0, 2]
    kept = [sum(part.flatten(1)[:, 0] for part in parts) > 0 for parts in zip(*factors, strict=True)]

    torch.manual_seed(1)
    if name.startswith("swin"):
        y = block(x, sizes)
    else:
        rows = tuple((images, h * w) for images, h, w in sizes)
        y = block(x, grids if name.startswith("xcit") else [None] * 3, sizes=rows)
    together = zip(unpack(y, sizes), unpack(x, sizes), strict=True)
    changed = [(part != before).flatten(1).any(1) for part, before in together]
    assert all(torch.equal(a, b) for a, b in zip(changed, kept, strict=True))


def test_a_class_with_vectors_of_its_own_gives_them_for_several_sizes_too():
    class Doubled(XCiT):
        def image_vectors(self, images):
            return 2 * super().image_vectors(images)

    network = Doubled("doubled", patch=8, **SMALL).eval()
    views = [torch.randn(images, 3, *size) for images, *size in VIEWS]
    for found, images in zip(network.view_vectors(views), views, strict=True):
        assert torch.equal(found, network.image_vectors(images))
