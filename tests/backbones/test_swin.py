"""What must hold for Swin whatever its weights; masks, pyramid and attention have files of their own."""

import copy
import pickle

import pytest
import torch
from torch import nn

from nestling import backbones
from nestling.backbones.swin import Swin


def tiny(**options) -> Swin:
    torch.manual_seed(0)
    sizes = {"embed_dim": 8, "depth": 2, "num_heads": 1, "window": 3}
    model = backbones.create("swin_tiny_w7", **{**sizes, **options})
    assert isinstance(model, Swin)
    return model


@pytest.mark.parametrize("padding", ["masked", "attended"])
@pytest.mark.parametrize("size", [(4, 4), (5, 11), (31, 33), (64, 128), (97, 40)])
def test_any_size_from_one_patch_up_has_a_ceil_divided_grid_and_finite_gradients(size, padding):
    model = tiny(padding=padding)
    features = model(torch.randn(2, 3, *size))
    assert features.grid == tuple(-(-side // 32) for side in size)
    assert features.patches.shape == (2, features.grid[0] * features.grid[1], model.embed_dim)
    assert features.cls.shape == (2, 64)
    (features.patches * torch.randn_like(features.patches)).sum().backward()
    without = [key for key, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert without == []


@torch.no_grad()
def test_the_image_level_vector_is_the_mean_of_the_normalised_patches():
    model = tiny().eval()
    features = model(torch.randn(2, 3, 96, 64))
    torch.testing.assert_close(features.cls, features.patches.mean(1))
    torch.testing.assert_close(features.patches.mean(-1), torch.zeros(2, 6), rtol=0, atol=1e-5)


@torch.no_grad()
def test_an_image_is_padded_with_zeros_at_the_bottom_and_right_to_whole_patches():
    model = tiny().eval()
    images = torch.randn(1, 3, 10, 13)
    padded = torch.zeros(1, 3, 12, 16)
    padded[..., :10, :13] = images
    torch.testing.assert_close(model(images).patches, model(padded).patches)


def test_an_image_below_one_patch_is_refused_with_the_nearest_size():
    with pytest.raises(ValueError, match=r"not 3 x 30 .* nearest size that works is 4 x 30"):
        tiny()(torch.randn(1, 3, 3, 30))


@torch.no_grad()
@pytest.mark.parametrize("padding", ["masked", "attended"])
def test_the_teachers_batch_of_one_equals_its_row_of_a_batch(padding):
    model = tiny(padding=padding).eval().double()
    images = torch.randn(3, 3, 40, 56).double()
    torch.testing.assert_close(model(images).cls[1:2], model(images[1:2]).cls)


def test_every_second_block_is_shifted():
    model = tiny(depth=4)
    assert [[block.attn.shifted for block in stage.blocks] for stage in model.layers] == [
        [False, True],
        [False, True],
        [False, True, False, True],
        [False, True],
    ]


def test_the_keys_are_the_published_ones():
    keys = tiny(depth=1, position="both", mask_token=True).state_dict().keys()
    assert {key for key in keys if not key.startswith("layers.")} == {
        "patch_embed.proj.weight",
        "patch_embed.proj.bias",
        "patch_embed.norm.weight",
        "patch_embed.norm.bias",
        "absolute_pos_embed",
        "mask_token",
        "norm.weight",
        "norm.bias",
    }
    assert {key.removeprefix("layers.1.") for key in keys if key.startswith("layers.1.")} == {
        f"blocks.{block}.{name}"
        for block in range(2)
        for name in [
            "attn.relative_position_bias_table",
            *(f"{part}.{kind}" for part in ["norm1", "norm2"] for kind in ["weight", "bias"]),
            *(f"attn.{part}.{kind}" for part in ["qkv", "proj"] for kind in ["weight", "bias"]),
            *(f"mlp.{part}.{kind}" for part in ["fc1", "fc2"] for kind in ["weight", "bias"]),
        ]
    } | {"downsample.norm.weight", "downsample.norm.bias", "downsample.reduction.weight"}
    assert not any(key.startswith("layers.3.downsample") for key in keys)


@torch.no_grad()
@pytest.mark.parametrize(
    ("position", "tables"),
    [("relative", (8, 0)), ("absolute", (0, 1)), ("both", (8, 1)), ("none", (0, 0))],
)
def test_position_switches_both_kinds_of_table(position, tables):
    model = tiny(position=position, position_size=48).eval()
    keys = list(model.state_dict())
    assert sum("relative_position_bias_table" in key for key in keys) == tables[0]
    assert keys.count("absolute_pos_embed") == tables[1]
    images = torch.randn(1, 3, 96, 96)
    knows_places = not torch.allclose(model(images).cls, model(images.roll(4, -1)).cls, atol=1e-6)
    assert knows_places  # windows alone tell places apart
    one_window = tiny(position=position, position_size=12, window=24).eval()
    first = one_window.layers[0].blocks[0]
    swapped = first(one_window._embed(images, None).flip(1)).flip(1)
    blind = torch.allclose(swapped, first(one_window._embed(images, None)), atol=1e-6)
    assert blind == (position in ("none", "absolute"))  # within a block only the bias tells them apart


@torch.no_grad()
def test_the_absolute_table_is_exact_on_its_own_grid_and_bicubic_elsewhere():
    model = tiny(position="absolute", position_size=30).eval().double()  # 30 pixels are 8 patches
    assert model.absolute_pos_embed.shape == (1, 64, 8)
    without = tiny(position="none").eval().double()
    without.load_state_dict(model.state_dict(), strict=False)
    table = model.absolute_pos_embed.unflatten(1, (8, 8))
    for size, grid in [((32, 29), (8, 8)), ((40, 96), (10, 24)), ((4, 12), (1, 3))]:
        images = torch.randn(1, 3, *size).double()
        added = model._embed(images, None) - without._embed(images, None)
        resized = nn.functional.interpolate(table.permute(0, 3, 1, 2), size=grid, mode="bicubic")
        torch.testing.assert_close(added, resized.permute(0, 2, 3, 1), rtol=0, atol=1e-12)


def test_the_rate_of_drop_path_rises_linearly_over_all_blocks():
    rates = [b.drop_path.rate for stage in tiny(drop_path=0.7).layers for b in stage.blocks]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])


@torch.no_grad()
def test_drop_path_drops_whole_branches_of_whole_samples_in_training_only():
    model = tiny(drop_path=0.5)
    images = torch.randn(2, 3, 32, 32)
    model.eval()
    assert torch.equal(model(images).cls, model(images).cls)
    block, x = model.layers[3].blocks[1].train(), torch.randn(64, 2, 3, 4)
    steps = (block._add(x, torch.ones_like(x)) - x).flatten(1)
    torch.testing.assert_close(steps, steps[:, :1].expand_as(steps))
    assert {round(value, 4) for value in steps[:, 0].tolist()} == {0.0, 2.0}


def test_attention_is_refused_for_want_of_a_class_token():
    assert not tiny().has_attention
    with pytest.raises(ValueError, match="swin_tiny_w7 has no class token"):
        tiny().attention(torch.randn(1, 3, 32, 32))


def test_weight_decay_spares_tokens_and_tables_by_exact_name():
    model = tiny(mask_token=True, position="both")
    spared = model.no_weight_decay()
    assert spared <= dict(model.named_parameters()).keys()
    assert {"mask_token", "absolute_pos_embed"} <= spared
    assert "layers.2.blocks.1.attn.relative_position_bias_table" in spared
    decayed = {name for name, p in model.named_parameters() if p.ndim > 1 and name not in spared}
    assert all(name.endswith(".weight") for name in decayed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding": "zeros"}, "padding of swin_tiny_w7 must be masked or attended, not 'zeros'"),
        ({"position": "rope"}, "position of swin_tiny_w7 must be relative, absolute, both or none"),
        ({"window": 0}, "window of swin_tiny_w7 must be above 0, not 0"),
        ({"num_heads": 3}, "embed_dim=8 of swin_tiny_w7 is not a multiple of num_heads=3"),
        ({"drop_path": 1.0}, "drop_path of swin_tiny_w7 must be from 0 to below 1"),
        ({"position_size": 0}, "position_size of swin_tiny_w7 must be above 0"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        tiny(**options)


@torch.no_grad()
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_gives_the_same_features_and_shares_nothing(copied):
    model = tiny(mask_token=True, pyramid=True, position="both").eval()
    images = torch.randn(1, 3, 44, 64)
    size_before = len(pickle.dumps(model))
    expected = model(images).cls
    assert len(pickle.dumps(model)) == size_before  # no mask travels with it
    twin = copied(model)
    assert torch.equal(expected, twin(images).cls)
    twin.norm.weight.zero_()
    assert model.norm.weight.abs().sum() > 0


@torch.no_grad()
def test_a_state_dict_round_trip_gives_the_same_features_whatever_the_sizes_seen_before():
    model, images = tiny().eval(), torch.randn(2, 3, 40, 64)
    model(torch.randn(1, 3, 100, 36))
    torch.manual_seed(7)
    other = backbones.create("swin_tiny_w7", embed_dim=8, depth=2, num_heads=1, window=3).eval()
    assert not torch.equal(model(images).cls, other(images).cls)
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(model(images).cls, other(images).cls)


def test_checkpointed_activations_give_the_same_gradients():
    model, images = tiny(drop_path=0.3), torch.randn(2, 3, 40, 64)
    gradients = []
    for model.activation_checkpointing in (False, True):
        torch.manual_seed(1)
        model.zero_grad()
        model(images).cls.square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("position", ["relative", "none"])
def test_half_precision_is_close_to_full(position, dtype):
    model = tiny(position=position).eval()
    images = torch.randn(2, 3, 40, 64)
    expected = model(images).cls
    with torch.autocast("cpu", dtype=dtype):
        found = model(images).cls
    assert nn.functional.cosine_similarity(found.float(), expected).min() > 0.999
    cast = model.to(dtype)(images.to(dtype)).cls
    assert cast.dtype == dtype
    assert nn.functional.cosine_similarity(cast.float(), expected).min() > 0.999


def test_in_chans_is_honoured():
    for in_chans in (1, 5):
        assert tiny(in_chans=in_chans)(torch.randn(2, in_chans, 8, 8)).cls.shape == (2, 64)


def test_weights_start_as_published():
    model = tiny(embed_dim=128, num_heads=32, window=14, position="both")
    attention = model.layers[0].blocks[0].attn
    for weight in (attention.qkv.weight, attention.relative_position_bias_table, model.absolute_pos_embed):
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert all(not m.bias.any() for m in model.modules() if isinstance(m, nn.Linear) and m.bias is not None)
