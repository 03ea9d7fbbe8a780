"""Swin against timm with the same weights, in float64, where timm's shift before padding agrees."""

import pytest
import torch
from torch import Tensor, nn

from nestling import backbones
from nestling.backbones.windows import relative_position_index

timm = pytest.importorskip("timm")
timm_swin = pytest.importorskip("timm.models.swin_transformer")

TWINS = {
    "swin_tiny_w7": "swin_tiny_patch4_window7_224",
    "swin_small_w7": "swin_small_patch4_window7_224",
    "swin_base_w7": "swin_base_patch4_window7_224",
    "swin_large_w7": "swin_large_patch4_window7_224",
}
SMALL = {"embed_dim": 16, "depths": (2, 2, 2, 2), "num_heads": (1, 2, 4, 8)}


def twins(theirs: nn.Module, name: str, **options) -> tuple[backbones.Backbone, nn.Module]:
    """Ours, and timm's model holding our state dict by way of timm's reader of official files."""
    torch.manual_seed(0)
    ours, theirs = backbones.create(name, **options).double(), theirs.double()
    with torch.no_grad():
        for tensor in ours.parameters():
            tensor += 0.1 * torch.rand_like(tensor)
    theirs.load_state_dict(timm_swin.checkpoint_filter_fn(dict(ours.state_dict()), theirs), strict=True)
    return ours.eval(), theirs.eval()


def largest_difference(ours: backbones.Backbone, theirs: nn.Module, images: Tensor) -> float:
    features, patches = ours(images), theirs.forward_features(images).flatten(1, 2)
    assert features.patches.shape == patches.shape
    cls = theirs.forward_head(theirs.forward_features(images), pre_logits=True)
    return max((features.cls - cls).abs().max(), (features.patches - patches).abs().max())


@torch.no_grad()
@pytest.mark.parametrize("padding", ["masked", "attended"])
@pytest.mark.slow
@pytest.mark.parametrize("name", ["swin_tiny_w7"])
def test_published_models_equal_timm_at_224(name, padding):
    ours, theirs = twins(timm.create_model(TWINS[name], num_classes=0), name, padding=padding)
    assert largest_difference(ours, theirs, torch.randn(1, 3, 224, 224).double()) < 1e-9


@torch.no_grad()
@pytest.mark.parametrize(("window", "side"), [(7, 224), (14, 448)])
def test_both_windows_equal_timm_where_no_grid_is_padded(window, side):
    theirs = timm_swin.SwinTransformer(img_size=side, window_size=window, num_classes=0, **SMALL)
    ours, theirs = twins(theirs, f"swin_tiny_w{window}", embed_dim=16, depth=2, num_heads=1)
    assert largest_difference(ours, theirs, torch.randn(1, 3, side, side).double()) < 1e-9


@torch.no_grad()
@pytest.mark.parametrize("size", [(112, 56), (56, 140)])
def test_the_first_stage_equals_timm_at_other_sizes_of_whole_windows(size):
    theirs = timm_swin.SwinTransformer(
        img_size=size, window_size=7, num_classes=0, strict_img_size=False, always_partition=True, **SMALL
    )
    ours, theirs = twins(theirs, "swin_tiny_w7", embed_dim=16, depth=2, num_heads=1)
    images = torch.randn(2, 3, *size).double()
    finest = nn.functional.layer_norm(theirs.layers[0](theirs.patch_embed(images)), (16,))
    torch.testing.assert_close(ours.pyramid(images)[0].permute(0, 2, 3, 1), finest, rtol=0, atol=1e-9)


@pytest.mark.parametrize("window", [(7, 7), (14, 14)])
def test_the_index_of_the_bias_table_equals_timms(window):
    ours = relative_position_index(window, window[0], torch.device("cpu"))
    assert torch.equal(ours, timm_swin.get_relative_position_index(*window))


@pytest.mark.parametrize("name", TWINS)
def test_parameter_counts_equal_timm(name):
    with torch.device("meta"):
        ours, theirs = backbones.create(name), timm.create_model(TWINS[name], num_classes=0)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize("name", [name.replace("w7", "w14") for name in TWINS])
def test_parameter_counts_of_window_14_equal_timm(name):
    twin = TWINS[name.replace("w14", "w7")]
    with torch.device("meta"):
        ours = backbones.create(name)
        theirs = timm.create_model(twin, num_classes=0, img_size=448, window_size=14)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
