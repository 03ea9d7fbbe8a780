"""What must hold for XCiT whatever its weights."""

import copy
import pickle

import pytest
import torch
from torch import nn

from nestling import backbones
from nestling.backbones.class_attention import ClassAttention
from nestling.backbones.xcit import LPI, XCA


def tiny(**options):
    torch.manual_seed(0)
    sizes = {"embed_dim": 32, "depth": 3, "num_heads": 4, "layer_scale": 0.5}
    return backbones.create("xcit_nano_12_p4", **{**sizes, **options})


def xca_as_written(layer: XCA, x: torch.Tensor) -> torch.Tensor:
    """Equation 3, one image and one head after the other."""
    images = []
    for tokens in x:
        q, k, v = layer.qkv(tokens).chunk(3, dim=-1)  # each N C
        width = q.shape[1] // layer.num_heads
        heads = []
        for head in range(layer.num_heads):
            own = slice(head * width, (head + 1) * width)
            q_hat, k_hat = (y[:, own] / y[:, own].norm(dim=0, keepdim=True) for y in (q, k))
            mixing = torch.softmax(layer.temperature[head] * k_hat.T @ q_hat, dim=0)
            heads.append(v[:, own] @ mixing)
        images.append(layer.proj(torch.cat(heads, dim=-1)))
    return torch.stack(images)


def test_xca_equals_its_equation():
    torch.manual_seed(0)
    layer = XCA(24, 3).double()
    with torch.no_grad():
        layer.temperature.copy_(torch.tensor([0.5, 2.0, 9.0])[:, None, None])
    x = torch.randn(2, 7, 24).double()
    torch.testing.assert_close(layer(x), xca_as_written(layer, x), rtol=0, atol=1e-12)


@torch.no_grad()
def test_heads_of_xca_are_block_diagonal():
    torch.manual_seed(0)
    layer = XCA(24, 3)
    layer.proj = nn.Identity()
    x = torch.randn(1, 7, 24)
    before = layer(x).unflatten(-1, (3, 8))
    layer.qkv.weight.view(3, 3, 8, 24)[:, 1] += 1.0  # query, key and value of the second head
    after = layer(x).unflatten(-1, (3, 8))
    assert torch.equal(before[:, :, [0, 2]], after[:, :, [0, 2]])
    assert not torch.allclose(before[:, :, 1], after[:, :, 1])


def test_xca_of_queries_that_are_all_zero_is_finite_with_finite_gradients():
    layer = XCA(8, 2)
    nn.init.zeros_(layer.qkv.bias)
    layer(torch.zeros(2, 5, 8)).sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


def test_xca_keeps_half_precision_in_range():
    layer = XCA(16, 2).half()
    with torch.no_grad():
        layer.qkv.weight.fill_(0.5)
    assert layer(torch.full((1, 4096, 16), 4.0).half()).isfinite().all()  # raw q k^T would be 4e6


@torch.no_grad()
def test_lpi_reaches_two_patches_and_only_within_its_channel():
    torch.manual_seed(0)
    layer = LPI(4).eval()
    x = torch.randn(1, 63, 4)
    moved = x.clone()
    moved[0, 3 * 9 + 4, 2] += 1.0  # row 3, column 4 of a 7 x 9 grid
    change = (layer(moved, (7, 9)) - layer(x, (7, 9))).abs().view(7, 9, 4) > 1e-7
    expected = torch.zeros(7, 9, 4, dtype=torch.bool)
    expected[1:6, 2:7, 2] = True
    assert torch.equal(change, expected)


@torch.no_grad()
def test_attention_maps_are_what_the_class_token_averages_with():
    torch.manual_seed(0)
    layer = ClassAttention(24, 3).double()
    tokens = torch.randn(2, 8, 24).double()
    q, k, v = layer.qkv(tokens).unflatten(-1, (3, 3, 8)).unbind(2)  # each B 1+N H D
    weights = torch.softmax(torch.einsum("bhd,bnhd->bhn", q[:, 0], k) / 8**0.5, dim=-1)
    torch.testing.assert_close(layer.attention(tokens), weights)
    expected = layer.proj(torch.einsum("bhn,bnhd->bhd", weights, v).flatten(1))
    torch.testing.assert_close(layer(tokens).squeeze(1), expected)


@torch.no_grad()
@pytest.mark.parametrize("cls_depth", [1, 2, 3])
def test_attention_over_patches_sums_to_less_than_one_and_is_the_last_layers(cls_depth):
    model = tiny(cls_depth=cls_depth).eval()
    seen = []
    model.cls_attn_blocks[-1].attn.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    images = torch.randn(2, 3, 20, 28)
    maps = model.attention(images)
    model(images)
    assert maps.shape == (2, 4, 5, 7)
    share = maps.sum((-2, -1))
    assert (share > 0).all()
    assert (share < 1).all()
    expected = model.cls_attn_blocks[-1].attn.attention(seen[-1])
    torch.testing.assert_close(maps.flatten(2), expected[..., 1:])
    torch.testing.assert_close(share + expected[..., 0], torch.ones_like(share))


@pytest.mark.parametrize("stem", ["conv", "linear"])
@pytest.mark.parametrize("patch", [4, 8, 16])
@pytest.mark.parametrize("size", [(1, 1), (1, 3), (3, 2)])
def test_any_size_from_one_patch_up_has_a_ceil_divided_grid(patch, stem, size):
    model = tiny(patch=patch, stem=stem, depth=1).eval()
    for extra in range(-1 if min(size) > 1 else 0, 2):
        height, width = (side * patch + extra for side in size)
        features = model(torch.randn(1, 3, height, width))
        assert features.grid == (-(-height // patch), -(-width // patch))
        assert features.patches.shape == (1, features.grid[0] * features.grid[1], 32)
        assert features.cls.shape == (1, 32)


def test_a_non_multiple_size_gives_finite_features_and_gradients():
    model = tiny(patch=16)
    features = model(torch.randn(2, 3, 97, 131))
    assert features.grid == (7, 9)
    features.cls.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_every_parameter_has_a_finite_gradient_from_the_class_token_at_the_smallest_size():
    model = tiny()
    features = model(torch.randn(4, 3, model.min_size, model.min_size))
    (features.cls * torch.randn(4, 32)).sum().backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert without == []


def test_an_image_below_one_patch_is_refused_with_the_nearest_size():
    model = backbones.create("xcit_nano_12_p16", depth=1)
    model.check_size(16, 17)
    with pytest.raises(ValueError, match=r"not 10 x 300 .* nearest size that works is 16 x 300"):
        model.check_size(10, 300)
    with pytest.raises(ValueError, match="16 x 16"):
        model(torch.randn(1, 3, 15, 16))


@torch.no_grad()
def test_the_linear_stem_pads_with_zeros_at_the_bottom_and_right():
    model = tiny(stem="linear").eval()
    images = torch.randn(1, 3, 10, 13)
    padded = torch.zeros(1, 3, 12, 16)
    padded[..., :10, :13] = images
    torch.testing.assert_close(model(images).patches, model(padded).patches)


@pytest.mark.parametrize("stem", ["conv", "linear"])
def test_in_chans_is_honoured(stem):
    for in_chans in (1, 5):
        tiny(in_chans=in_chans, stem=stem)(torch.randn(2, in_chans, 8, 8))
        with pytest.raises(RuntimeError, match="channels"):
            tiny(in_chans=in_chans, stem=stem)(torch.randn(2, 3, 8, 8))


@torch.no_grad()
def test_the_teachers_batch_of_one_equals_its_row_of_a_batch():
    model = tiny().eval().double()
    images = torch.randn(3, 3, 16, 24).double()
    torch.testing.assert_close(model(images).cls[1:2], model(images[1:2]).cls)


@torch.no_grad()
def test_drop_path_acts_in_training_only_and_keeps_the_expectation():
    model = tiny(drop_path=0.3, depth=1)
    images = torch.randn(2, 3, 8, 8)
    model.eval()
    assert torch.equal(model(images).cls, model(images).cls)
    factors = model.blocks[0].drop_path(torch.empty(20_000, 1, 1))
    assert factors.unique().tolist() == pytest.approx([0, 1 / 0.7])
    assert factors.mean().item() == pytest.approx(1, abs=0.02)  # 4 standard errors
    model.train()
    assert not torch.equal(model(images).cls, model(images).cls)


@torch.no_grad()
def test_drop_path_drops_whole_branches_of_whole_samples():
    model = tiny(drop_path=0.5)
    block = model.blocks[0].train()
    x = torch.randn(64, 4, 32)
    torch.manual_seed(3)
    out = block._add(x, torch.ones_like(x), torch.full((32,), 0.25))
    steps = (out - x).flatten(1)
    torch.testing.assert_close(steps, steps[:, :1].expand_as(steps))
    assert {round(value, 4) for value in steps[:, 0].tolist()} == {0.0, 0.5}


@torch.no_grad()
def test_the_rate_of_drop_path_is_the_same_in_all_blocks():
    assert {block.drop_path.rate for block in tiny(drop_path=0.1).blocks} == {0.1}


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


def test_weight_decay_spares_tokens_layer_scales_and_temperatures_by_exact_name():
    model = tiny(mask_token=True, depth=2)
    spared = model.no_weight_decay()
    assert spared <= dict(model.named_parameters()).keys()
    assert {"cls_token", "mask_token", "blocks.1.attn.temperature", "blocks.0.gamma3"} <= spared
    assert "cls_attn_blocks.1.gamma2" in spared
    decayed = [p for name, p in model.named_parameters() if p.ndim > 1 and name not in spared]
    assert all(isinstance(p, nn.Parameter) and p.ndim in (2, 4) for p in decayed)


@torch.no_grad()
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_gives_the_same_features_and_shares_nothing(copied):
    model = tiny(mask_token=True, pyramid=True).eval()
    model(torch.randn(1, 3, 8, 8))
    twin, images = copied(model), torch.randn(1, 3, 12, 8)
    assert torch.equal(model(images).cls, twin(images).cls)
    twin.cls_token.zero_()
    assert model.cls_token.abs().sum() > 0


@torch.no_grad()
def test_a_state_dict_round_trip_gives_the_same_features():
    model, other, images = tiny().eval(), backbones.create("xcit_nano_12_p4", embed_dim=32, depth=3), None
    images = torch.randn(2, 3, 12, 8)
    assert not torch.equal(model(images).cls, other.eval()(images).cls)
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(model(images).cls, other(images).cls)


@pytest.mark.slow
def test_the_whole_graph_compiles_at_several_sizes_and_trains_alike():
    torch.compiler.reset()
    model = tiny(mask_token=True)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    for size in [(16, 16), (8, 12), (9, 13)]:
        images = torch.randn(2, 3, *size)
        mask = torch.rand(2, -(-size[0] // 4), -(-size[1] // 4)) < 0.5
        for inputs in [(images,), (images, mask)]:
            expected, found = model(*inputs), compiled(*inputs)
            torch.testing.assert_close(found.cls, expected.cls)
            torch.testing.assert_close(found.patches, expected.patches)
            assert found.grid == expected.grid
            found.cls.sum().backward()


@torch.no_grad()
def test_position_encoding_ignores_autocast():
    encoding = tiny().pos_embeder
    expected = encoding((9, 30))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = encoding((9, 30))
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_features_are_close_to_full_precision(dtype):
    model = tiny().eval()
    images = torch.randn(2, 3, 16, 16)
    expected = model(images).cls
    with torch.autocast("cpu", dtype=dtype):
        found = model(images).cls
    assert torch.nn.functional.cosine_similarity(found.float(), expected).min() > 0.999


def test_a_model_cast_to_bfloat16_runs():
    assert tiny().bfloat16()(torch.randn(2, 3, 8, 8).bfloat16()).cls.dtype == torch.bfloat16


def test_linear_layers_start_as_published():
    model = tiny(embed_dim=256, depth=1)
    weight = model.blocks[0].mlp.fc1.weight
    assert weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert all(not m.bias.any() for m in model.modules() if isinstance(m, nn.Linear))
    assert model.cls_token.std().item() == pytest.approx(0.02, rel=0.2)
    assert (model.blocks[0].attn.temperature == 1).all()


def test_gradients_of_a_single_image_do_not_depend_on_the_order_of_memory():
    """torch's batch norm on CPUs takes a gradient of one image for another where layouts differ."""
    torch.manual_seed(0)
    stem, images = tiny().double().train().patch_embed, torch.randn(1, 3, 48, 40).double()
    maps = stem(images)
    plain = torch.randn_like(maps, memory_format=torch.contiguous_format)
    as_tokens = plain.flatten(2).mT.contiguous().mT.unflatten(2, maps.shape[2:])
    expected = torch.autograd.grad(maps, list(stem.parameters()), plain, retain_graph=True)
    found = torch.autograd.grad(maps, list(stem.parameters()), as_tokens)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
