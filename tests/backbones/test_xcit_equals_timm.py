"""XCiT against an independent implementation with the same weights, in float64."""

import pytest
import torch
from torch import Tensor, nn

from nestling import backbones

timm = pytest.importorskip("timm")
timm_xcit = pytest.importorskip("timm.models.xcit")

PUBLISHED = [name for name in backbones.names() if name.startswith("xcit_") and not name.endswith("_p4")]


def jitter(model: nn.Module) -> None:
    """Move every weight and statistic off its initial value, where a mistake could hide."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor += 0.1 * torch.rand_like(tensor)


def twins(name: str, **small: int) -> tuple[backbones.Backbone, nn.Module]:
    """Ours, and timm's model holding our state dict by way of timm's reader of official files."""
    torch.manual_seed(0)
    ours = backbones.create(name, **small).double()
    theirs = timm.create_model(f"{name}_224", num_classes=0, **small).double()
    jitter(ours)
    theirs.load_state_dict(timm_xcit.checkpoint_filter_fn(dict(ours.state_dict()), theirs), strict=True)
    return ours, theirs


def largest_difference(ours: backbones.Backbone, theirs: nn.Module, images: Tensor) -> float:
    features, tokens = ours(images), theirs.forward_features(images)
    return torch.cat([features.cls[:, None] - tokens[:, :1], features.patches - tokens[:, 1:]], 1).abs().max()


@torch.no_grad()
@pytest.mark.parametrize("size", [(96, 96), (160, 160), (96, 160), (97, 131), (16, 40)])
@pytest.mark.parametrize(("name", "depth"), [("xcit_nano_12_p16", 12), ("xcit_tiny_24_p8", 4)])
def test_features_equal_timm_at_any_size(name, depth, size):
    ours, theirs = (model.eval() for model in twins(name, depth=depth))
    assert largest_difference(ours, theirs, torch.randn(1, 3, *size).double()) < 1e-9


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_width_equals_timm(name):
    """One block of each kind; that there are as many as in timm, its parameters show below."""
    ours, theirs = (model.eval() for model in twins(name, depth=1))
    for size in [(224, 224), (96, 160)] if ours.embed_dim < 200 else [(160, 96)]:
        assert largest_difference(ours, theirs, torch.randn(1, 3, *size).double()) < 1e-9, size


def test_training_mode_gradients_and_statistics_equal_timm():
    ours, theirs = twins("xcit_tiny_12_p8", depth=2)
    images = torch.randn(3, 3, 32, 48).double()
    features, tokens = ours.train()(images), theirs.train().forward_features(images)
    weight = torch.randn_like(tokens)
    (torch.cat([features.cls[:, None], features.patches], 1) * weight).sum().backward()
    (tokens * weight).sum().backward()

    gradients = {key: parameter.grad for key, parameter in ours.named_parameters()}
    gradients = timm_xcit.checkpoint_filter_fn(gradients, theirs)
    for key, parameter in theirs.named_parameters():
        torch.testing.assert_close(gradients[key], parameter.grad, rtol=1e-9, atol=1e-9, msg=key)
    statistics = dict(ours.named_buffers())
    for key, buffer in theirs.named_buffers():
        torch.testing.assert_close(statistics[key], buffer, rtol=1e-12, atol=1e-12, msg=key)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if "_24_p8" in name else []) for name in PUBLISHED]
)
def test_every_published_name_has_timms_parameters(name):
    with torch.device("meta"):
        ours, theirs = backbones.create(name), timm.create_model(f"{name}_224", num_classes=0)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    assert ours.blocks[0].gamma1.shape == (ours.embed_dim,)


@pytest.mark.parametrize("name", PUBLISHED)
def test_layer_scale_starts_where_timms_does(name):
    ours = backbones.create(name, depth=1, embed_dim=32, num_heads=4)
    theirs = timm.create_model(f"{name}_224", num_classes=0, depth=1, embed_dim=32, num_heads=4)
    assert ours.cls_attn_blocks[0].tokens_norm == theirs.cls_attn_blocks[0].tokens_norm
    assert torch.equal(ours.blocks[0].gamma1, theirs.blocks[0].gamma1)
    assert torch.equal(ours.cls_attn_blocks[0].gamma2, theirs.cls_attn_blocks[0].gamma2)


@pytest.mark.parametrize("grid", [(1, 1), (2, 2), (14, 14), (6, 10), (3, 97)])
def test_position_encoding_equals_timm(grid):
    ours, theirs = twins("xcit_nano_12_p16", depth=1)
    expected = theirs.pos_embed(1, *grid).flatten(2).mT[0]
    torch.testing.assert_close(ours.pos_embeder(grid), expected, rtol=0, atol=1e-12)
