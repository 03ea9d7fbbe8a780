"""Swin's masked patches, and its maps for detectors."""

import pytest
import torch

from nestling import backbones
from nestling.backbones.swin import Swin


def tiny(**options) -> Swin:
    torch.manual_seed(0)
    sizes = {"embed_dim": 8, "depth": 2, "num_heads": 1, "window": 3}
    model = backbones.create("swin_tiny_w7", **{**sizes, **options})
    assert isinstance(model, Swin)
    return model


@torch.no_grad()
def test_a_masked_patch_shows_nothing_of_its_own_pixels():
    model = tiny(mask_token=True).eval()
    model.mask_token.normal_()
    images, mask = torch.randn(2, 3, 50, 70), torch.zeros(2, 2, 3, dtype=torch.bool)
    mask[0, 1, 2] = True
    changed = images.clone()
    changed[0, :, 32:, 64:] = 7.0  # the pixels of that patch: cut off by the image's border
    assert torch.equal(model(images, mask).patches, model(changed, mask).patches)
    changed[0, :, 31] = 7.0
    assert not torch.equal(model(images, mask).patches, model(changed, mask).patches)
    plain, masked = model(images).patches, model(images, mask).patches
    torch.testing.assert_close(plain[1], masked[1])
    assert not torch.allclose(plain[0], masked[0])


def test_the_mask_token_learns_and_exists_on_request_only():
    images, mask = torch.randn(2, 3, 64, 64), torch.ones(2, 2, 2, dtype=torch.bool)
    model = tiny(mask_token=True)
    (model(images, mask).patches * torch.randn(64)).sum().backward()
    assert model.mask_token.grad.abs().sum() > 0
    with pytest.raises(ValueError, match="mask_token=True"):
        tiny()(images, mask)


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(2, 2, 2),
        torch.ones(2, 4, dtype=torch.bool),
        torch.ones(1, 2, 2, dtype=torch.bool),
        torch.ones(2, 16, 16, dtype=torch.bool),
    ],
)
def test_a_mask_of_another_shape_or_type_is_refused(mask):
    with pytest.raises(ValueError, match=r"torch.bool of shape \(2, 2, 2\)"):
        tiny(mask_token=True)(torch.randn(2, 3, 64, 64), mask)


@torch.no_grad()
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("size", [(64, 96), (97, 131), (4, 4)])
def test_the_pyramid_has_strides_4_8_16_and_32_and_is_normalised(size, learned):
    model = tiny(pyramid=learned).eval()
    levels = model.pyramid(torch.randn(1, 3, *size))
    expected = [
        (1, width, -(-size[0] // stride), -(-size[1] // stride))
        for width, stride in zip((8, 16, 32, 64), (4, 8, 16, 32), strict=True)
    ]
    assert [tuple(level.shape) for level in levels] == expected
    for level in levels:
        torch.testing.assert_close(level.mean(1), torch.zeros_like(level[:, 0]), rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_pyramid_is_read_before_merging_by_norms_with_the_published_names():
    model = tiny(pyramid=True).eval()
    added = model.state_dict().keys() - tiny().state_dict().keys()
    assert {key.rpartition(".")[0] for key in added} == {"norm0", "norm1", "norm2", "norm3"}
    outputs = []
    for stage in model.layers:
        stage.blocks[-1].register_forward_hook(lambda _, __, output: outputs.append(output))
    model.norm1.weight.fill_(3.0)
    levels = model.pyramid(torch.randn(1, 3, 40, 40))
    for number, (level, output) in enumerate(zip(levels, outputs, strict=True)):
        expected = model.get_submodule(f"norm{number}")(output)
        torch.testing.assert_close(level.permute(0, 2, 3, 1), expected)
