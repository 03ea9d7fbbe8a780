"""What must hold for Swin whatever its weights."""

import copy
import pickle

import pytest
import torch
from torch import nn

from nestling import backbones
from nestling.backbones.swin import PatchMerging, Swin
from nestling.backbones.symbolic_windows import cut_grid
from nestling.backbones.window_attention import WindowAttention
from nestling.backbones.windows import Windows, token_places


def tiny(**options) -> Swin:
    torch.manual_seed(0)
    sizes = {"embed_dim": 8, "depth": 2, "num_heads": 1, "window": 3}
    model = backbones.create("swin_tiny_w7", **{**sizes, **options})
    assert isinstance(model, Swin)
    return model


def attention_as_written(layer: WindowAttention, x: torch.Tensor) -> torch.Tensor:
    """Equation 4, token by token: each sees the real tokens of its window that lie beside it on the grid."""
    (height, width), size, heads = x.shape[1:3], layer.window, layer.num_heads
    shift = [size // 2 if layer.shifted and side > size else 0 for side in (height, width)]
    out = torch.zeros_like(x)

    def window_of(place: tuple[int, int]) -> tuple[int, int]:
        return (place[0] + size - shift[0]) // size, (place[1] + size - shift[1]) // size

    places = [(row, column) for row in range(height) for column in range(width)]
    for row, column in places:
        seen = [place for place in places if window_of(place) == window_of((row, column))]
        q = layer.qkv(x[:, row, column]).chunk(3, dim=-1)[0].unflatten(-1, (heads, -1))  # B H D
        keys, values = zip(*(layer.qkv(x[:, y, z]).chunk(3, dim=-1)[1:] for y, z in seen), strict=True)
        k, v = (torch.stack(t, 1).unflatten(-1, (heads, -1)) for t in (keys, values))  # B S H D
        logits = torch.einsum("bhd,bshd->bhs", q, k) / q.shape[-1] ** 0.5
        if layer.relative_position_bias_table is not None:
            table = layer.relative_position_bias_table.view(2 * size - 1, 2 * size - 1, heads)
            offsets = [(row - y + size - 1, column - z + size - 1) for y, z in seen]
            logits = logits + torch.stack([table[offset] for offset in offsets], dim=-1)
        weights = logits.softmax(dim=-1)
        out[:, row, column] = layer.proj(torch.einsum("bhs,bshd->bhd", weights, v).flatten(1))
    return out


@torch.no_grad()
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("grid", [(6, 6), (7, 5), (2, 2), (2, 7), (3, 4), (1, 1)])
def test_masked_attention_equals_its_equation_among_real_tokens(grid, relative, shifted):
    torch.manual_seed(0)
    layer = WindowAttention(8, 2, 3, shifted, masked=True, relative=relative).double()
    if relative:
        layer.relative_position_bias_table.normal_()
    x = torch.randn(2, *grid, 8).double()
    torch.testing.assert_close(layer(x), attention_as_written(layer, x), rtol=0, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("grid", [(2, 3), (4, 4), (1, 5)])
def test_a_grid_below_the_window_is_plain_attention_with_the_tables_bias(grid):
    torch.manual_seed(0)
    layer = WindowAttention(8, 2, 5, shifted=True).double()
    layer.relative_position_bias_table.normal_()
    x = torch.randn(2, *grid, 8).double()
    q, k, v = layer.qkv(x.flatten(1, 2)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    rows, columns = torch.meshgrid(*(torch.arange(side) for side in grid), indexing="ij")
    row, column = rows.flatten(), columns.flatten()
    bias = layer.relative_position_bias_table.view(9, 9, 2)[
        row[:, None] - row + 4, column[:, None] - column + 4
    ]
    weights = torch.softmax(q @ k.mT / 2 + bias.permute(2, 0, 1), dim=-1)
    expected = layer.proj((weights @ v).transpose(1, 2).flatten(2)).unflatten(1, grid)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("shifted", [False, True])
def test_real_tokens_see_nothing_of_padded_places_unless_padding_is_attended(shifted, masked):
    torch.manual_seed(0)
    layer = WindowAttention(8, 2, 3, shifted, masked)
    x, padded = torch.randn(1, 7, 5, 8), torch.randn(1, 9, 6, 8)
    padded[:, :7, :5] = x

    class Filled(Windows):
        """Its padding holds numbers instead of zeros."""

        def cut(self, x: torch.Tensor) -> torch.Tensor:
            row, column = token_places(self, x.device)
            return padded[:, row, column].unflatten(2, self.size).unflatten(1, (3, 2)).transpose(2, 3)

    filled = layer.within(Filled(*cut_grid((7, 5), 3, shifted, masked)), x)
    assert torch.allclose(filled, layer(x), atol=1e-6) == masked
    assert filled.isfinite().all()


@torch.no_grad()
def test_patch_merging_puts_two_by_two_tokens_side_by_side_columns_before_rows():
    layer = PatchMerging(1)
    layer.norm, layer.reduction = nn.Identity(), nn.Identity()
    x = torch.arange(1.0, 7.0).view(1, 2, 3, 1)  # 1 2 3 over 4 5 6
    assert layer(x).tolist() == [[[[1, 4, 2, 5], [3, 6, 0, 0]]]]
    assert layer(x[:, :1]).tolist() == [[[[1, 0, 2, 0], [3, 0, 0, 0]]]]


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
