"""Read-outs: the vector that a name means, and names that mean none."""

import pytest
import torch

from nestling import backbones
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.readouts import last_blocks, readout

NAMES = ["cls", "mean_patch", "cls+mean_patch", "last2:cls", "last2:mean_patch", "last3:cls+mean_patch"]


@pytest.fixture(scope="module")
def blocks():
    torch.manual_seed(0)
    vit = backbones.create("vit_tiny_p16", embed_dim=24, depth=3, num_heads=2, position_size=32).eval()
    images = torch.randn(2, 3, 32, 48)
    with torch.no_grad():
        return vit, images, vit.last_blocks(images, 3)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_means_what_it_says(blocks, name):
    vit, images, last = blocks
    wanted = readout(name)
    with torch.no_grad():
        found = wanted(last_blocks(vit, images, [wanted]))
    count = int(name[4]) if name.startswith("last") else 1
    cls = [block.cls for block in last[-count:]]
    means = [block.patches.mean(1) for block in last[-count:]]
    expected = {"cls": cls, "mean_patch": means, "cls+mean_patch": [*cls, means[-1]]}[name.split(":")[-1]]
    torch.testing.assert_close(found, torch.cat(expected, dim=1), atol=1e-6, rtol=1e-5)
    assert found.dtype == torch.float32


def test_one_forward_serves_all_names(blocks):
    vit, images, _ = blocks
    wanted = [readout(name) for name in NAMES]
    with torch.no_grad():
        shared = last_blocks(vit, images, wanted)
        alone = last_blocks(vit, images, wanted[:1])
    assert len(shared) == 3
    assert len(alone) == 1
    assert torch.equal(wanted[0](shared), wanted[0](alone))


@pytest.mark.parametrize(
    "name", ["clss", "last0:cls", "last:cls", "last4", "mean_patch+cls", "last100:cls", ""]
)
def test_other_names_are_refused_with_those_there_are(name):
    with pytest.raises(
        UserError, match=r"is no read-out of a backbone; there are cls, mean_patch or .*last4:cls"
    ):
        readout(name)


def test_more_blocks_than_there_are_are_refused_by_the_names_that_ask_for_them(blocks):
    vit, images, _ = blocks
    with pytest.raises(UserError, match=r"^last9:cls: "):
        last_blocks(vit, images, [readout("cls"), readout("last9:cls")])
