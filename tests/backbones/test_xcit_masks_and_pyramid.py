"""Masked patches and feature maps of XCiT."""

import pytest
import torch
from tiny_xcit import tiny
from torch import nn


@torch.no_grad()
def test_a_masked_patch_shows_nothing_of_its_own_embedding():
    model = tiny(mask_token=True, stem="linear").eval()
    model.mask_token.normal_()
    images, mask = torch.randn(2, 3, 8, 12), torch.zeros(2, 2, 3, dtype=torch.bool)
    mask[0, 1, 2] = True
    changed = images.clone()
    changed[0, :, 4:, 8:] = 7.0  # the pixels of that patch
    assert torch.equal(model(images, mask).patches, model(changed, mask).patches)
    plain, masked = model(images).patches, model(images, mask).patches
    torch.testing.assert_close(plain[1], masked[1])
    assert not torch.allclose(plain[0], masked[0])


def test_the_mask_token_learns_and_exists_on_request_only():
    images, mask = torch.randn(2, 3, 8, 8), torch.ones(2, 2, 2, dtype=torch.bool)
    model = tiny(mask_token=True)
    model(images, mask).patches.square().sum().backward()
    assert model.mask_token.grad.abs().sum() > 0
    assert "mask_token" not in tiny().state_dict()
    with pytest.raises(ValueError, match="mask_token=True"):
        tiny()(images, mask)


@pytest.mark.parametrize(
    "mask", [torch.ones(2, 2, 2), torch.ones(2, 4, dtype=torch.bool), torch.ones(1, 2, 2, dtype=torch.bool)]
)
def test_a_mask_of_another_shape_or_type_is_refused(mask):
    with pytest.raises(ValueError, match=r"torch.bool of shape \(2, 2, 2\)"):
        tiny(mask_token=True)(torch.randn(2, 3, 8, 8), mask)


@torch.no_grad()
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("size", [(64, 96), (97, 131), (16, 16)])
@pytest.mark.parametrize("patch", [4, 8, 16])
def test_the_pyramid_has_strides_4_8_16_and_32(patch, size, learned):
    model = tiny(patch=patch, pyramid=learned).eval()
    levels = model.pyramid(torch.randn(1, 3, *size))
    expected = [(1, 32, -(-size[0] // stride), -(-size[1] // stride)) for stride in (4, 8, 16, 32)]
    assert [tuple(level.shape) for level in levels] == expected


def test_the_pyramid_is_read_after_a_third_half_two_thirds_and_all_of_the_blocks():
    model = tiny(patch=4, depth=12).eval()
    outputs = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, __, output: outputs.append(output))
    finest, *_, coarsest = model.pyramid(torch.randn(1, 3, 32, 32))
    torch.testing.assert_close(finest.flatten(2).mT, outputs[3])
    torch.testing.assert_close(
        coarsest, nn.functional.max_pool2d(outputs[11].mT.unflatten(2, (8, 8)), 8), msg="the last block"
    )


def test_learned_pyramid_layers_carry_the_published_names_and_exist_on_request_only():
    added = tiny(patch=16, pyramid=True).state_dict().keys() - tiny(patch=16).state_dict().keys()
    prefixes = {key.rpartition(".")[0] for key in added}
    assert prefixes == {"fpn1.0", "fpn1.1", "fpn1.3", "fpn2.0"}
