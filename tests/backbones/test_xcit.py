"""What must hold for XCiT whatever its weights; copies and state dicts are test_contract.py's."""

import copy

import pytest
import torch
from tiny_xcit import tiny
from torch import nn

from nestling import backbones


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


def test_weight_decay_spares_tokens_layer_scales_and_temperatures_by_exact_name():
    model = tiny(mask_token=True, depth=2)
    spared = model.no_weight_decay()
    assert spared <= dict(model.named_parameters()).keys()
    assert {"cls_token", "mask_token", "blocks.1.attn.temperature", "blocks.0.gamma3"} <= spared
    assert "cls_attn_blocks.1.gamma2" in spared
    decayed = [p for name, p in model.named_parameters() if p.ndim > 1 and name not in spared]
    assert all(isinstance(p, nn.Parameter) and p.ndim in (2, 4) for p in decayed)


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
