"""What the last blocks put out: normalised, in order, the last one being the forward itself."""

import pytest
import timm
import torch

from nestling import backbones
from nestling.backbones.weights.timm import to_timm

SMALL = {
    "vit_tiny_p16": {"depth": 3, "embed_dim": 24, "num_heads": 2, "registers": 2, "position_size": 64},
    "xcit_nano_12_p8": {"depth": 3, "embed_dim": 24, "num_heads": 2},
    "swin_tiny_w7": {"depth": 2, "embed_dim": 16, "num_heads": 1},
}
BLOCKS = {"vit_tiny_p16": 3, "xcit_nano_12_p8": 5, "swin_tiny_w7": 8}


def small(name):
    torch.manual_seed(0)
    return backbones.create(name, **SMALL[name]).eval()


@pytest.mark.parametrize("name", SMALL)
def test_the_last_block_is_the_forward_and_earlier_ones_do_not_depend_on_the_count(name):
    network, images = small(name), torch.randn(2, 3, 64, 48)
    with torch.no_grad():
        every, last = network.last_blocks(images, BLOCKS[name]), network(images)
        some = network.last_blocks(images, 2)
    assert len(every) == BLOCKS[name]
    for found, wanted in zip(some, every[-2:], strict=True):
        assert torch.equal(found.cls, wanted.cls)
        assert torch.equal(found.patches, wanted.patches)
    assert torch.equal(every[-1].cls, last.cls)
    assert torch.equal(every[-1].patches, last.patches)
    assert every[-1].grid == last.grid
    assert not torch.equal(every[-2].patches.mean(1), every[-3].patches.mean(1))


@pytest.mark.parametrize(
    ("name", "wrong"), [("vit_tiny_p16", 4), ("xcit_nano_12_p8", 6), ("swin_tiny_w7", 0)]
)
def test_another_number_of_blocks_than_there_are_is_refused(name, wrong):
    with pytest.raises(ValueError, match=rf"{name} shows its last 1 to {BLOCKS[name]} blocks, not {wrong}"):
        small(name).last_blocks(torch.zeros(1, 3, 64, 64), wrong)


def test_an_adapted_network_shows_its_last_block_alone():
    network = backbones.create("timm:vit_tiny_patch16_224", depth=1).eval()
    images = torch.zeros(1, 3, 224, 224)
    with torch.no_grad():
        assert torch.equal(network.last_blocks(images, 1)[0].cls, network(images).cls)
    with pytest.raises(ValueError, match="shows its last block alone, not 2"):
        network.last_blocks(images, 2)


def test_a_vits_last_blocks_equal_timms_intermediate_layers():
    network = backbones.create("vit_tiny_p16", depth=3, position_size=64).eval().double()
    model = to_timm(network)
    theirs = timm.create_model(model.name, num_classes=0, **model.arguments).eval().double()
    theirs.load_state_dict(model.tensors, strict=True)
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        ours = network.last_blocks(images, 3)
        wanted = theirs.get_intermediate_layers(images, n=3, return_prefix_tokens=True, norm=True)
    for found, (patches, prefix) in zip(ours, wanted, strict=True):
        torch.testing.assert_close(found.patches, patches, rtol=0, atol=1e-9)
        torch.testing.assert_close(found.cls, prefix[:, 0], rtol=0, atol=1e-9)
