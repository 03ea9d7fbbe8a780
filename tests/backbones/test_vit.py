"""What must hold for ViT whatever its weights."""

import copy
import math
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling import backbones
from nestling.backbones.layers import LayerScale, SwiGLU
from nestling.backbones.positions import sincos2d
from nestling.backbones.self_attention import Attention, Block, by_head
from nestling.backbones.vit import ViT

POSITIONS = ["learned", "sincos2d", "rope", "none"]


def tiny(name: str = "vit_tiny_p16", **options) -> ViT:
    torch.manual_seed(0)
    sizes = {"embed_dim": 32, "depth": 3, "num_heads": 2, "position_size": 56 if "p14" in name else 64}
    model = backbones.create(name, **{**sizes, **options})
    assert isinstance(model, ViT)
    return model


def attention_as_written(layer: Attention, x: Tensor) -> Tensor:
    """Appendix A of the paper, one image and one head after the other."""
    images = []
    for tokens in x:
        q, k, v = layer.qkv(tokens).chunk(3, dim=-1)  # each T C
        width = q.shape[1] // layer.num_heads
        heads = []
        for head in range(layer.num_heads):
            own = slice(head * width, (head + 1) * width)
            weights = torch.softmax(q[:, own] @ k[:, own].T / math.sqrt(width), dim=1)
            heads.append(weights @ v[:, own])
        images.append(layer.proj(torch.cat(heads, dim=-1)))
    return torch.stack(images)


def test_attention_equals_its_equation():
    torch.manual_seed(0)
    layer = Attention(24, 3, qkv_bias=True).double()
    x = torch.randn(2, 7, 24).double()
    torch.testing.assert_close(layer(x), attention_as_written(layer, x), rtol=0, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("position", ["learned", "rope"])
@pytest.mark.parametrize("registers", [0, 3])
def test_attention_maps_are_what_the_fused_path_averages_values_with(position, registers):
    model = tiny(position=position, registers=registers).double().eval()
    model.apply(lambda m: nn.init.normal_(m.weight, std=0.3) if isinstance(m, nn.Linear) else None)
    images, layer, seen = torch.randn(2, 3, 48, 80).double(), model.blocks[-1].attn, {}
    layer.register_forward_hook(lambda _, inputs, output: seen.update(inputs=inputs, output=output))
    model(images)

    # With one-hot values the fused kernel returns its own weights.
    x, rope, _ = seen["inputs"]
    q, k, v = by_head(layer.projected(x), rope)
    tokens = 1 + registers + 15
    weights = F.scaled_dot_product_attention(q, k, torch.eye(tokens).double().expand(2, 2, -1, -1))
    averaged = layer.proj((weights @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(averaged, seen["output"], rtol=0, atol=1e-12)

    maps = model.attention(images)
    assert maps.shape == (2, 2, 3, 5)
    torch.testing.assert_close(maps.flatten(2), weights[:, :, 0, 1 + registers :], rtol=0, atol=1e-12)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("size", [(16, 16), (64, 64), (48, 80), (16, 112)])
def test_any_multiple_of_the_patch_works(position, size):
    model = tiny(position=position, registers=2, layer_scale=0.5)
    features = model(torch.randn(2, 3, *size))
    grid = (size[0] // 16, size[1] // 16)
    assert features.grid == grid
    assert features.cls.shape == (2, 32)
    assert features.patches.shape == (2, grid[0] * grid[1], 32)
    features.patches.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (
            (100, 64),
            r"multiples of 16 pixels, not 100 x 64 .*; the nearest sizes that work are height 96 or 112$",
        ),
        ((64, 3), r"not 64 x 3 .*; the nearest sizes that work are width 16$"),
        ((17, 40), r"nearest sizes that work are height 16 or 32 and width 32 or 48$"),
    ],
)
def test_other_sizes_are_refused_naming_the_nearest_for_each_side(size, message):
    model = tiny()
    with pytest.raises(ValueError, match=message):
        model.check_size(*size)
    with pytest.raises(ValueError, match=message):
        model(torch.randn(1, 3, *size))


def test_parameters_carry_the_published_names_and_shapes():
    model = tiny("vit_tiny_p14", depth=1, layer_scale=1.0, registers=4, mask_token=True, ffn="swiglu")
    outer = {
        "cls_token": (1, 1, 32),
        "register_tokens": (1, 4, 32),
        "mask_token": (1, 1, 32),
        "pos_embed": (1, 17, 32),
        "patch_embed.proj.weight": (32, 3, 14, 14),
        "patch_embed.proj.bias": (32,),
        "norm.weight": (32,),
        "norm.bias": (32,),
    }
    linear = {"attn.qkv": (96, 32), "attn.proj": (32, 32), "mlp.w12": (176, 32), "mlp.w3": (32, 88)}
    weights = {f"blocks.0.{key}.weight": shape for key, shape in linear.items()}
    biases = {f"blocks.0.{key}.bias": shape[:1] for key, shape in linear.items()}
    norms = {f"blocks.0.norm{i}.{key}": (32,) for i in "12" for key in ("weight", "bias")}
    scales = {f"blocks.0.ls{i}.gamma": (32,) for i in "12"}
    found = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    assert found == {**outer, **weights, **biases, **norms, **scales}


def test_tokens_come_in_the_published_order_with_positions_for_all_but_registers():
    model = tiny(registers=2, depth=1)
    with torch.no_grad():
        model.pos_embed.copy_(torch.arange(17.0)[:, None])
        model.cls_token.fill_(100.0)
        model.register_tokens.fill_(200.0)
        model.patch_embed.proj.weight.zero_()
    seen: list[Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(torch.randn(1, 3, 64, 64))
    tokens = seen[0] - torch.cat([torch.zeros(3, 32), model.patch_embed.proj.bias.expand(16, -1)])
    expected = torch.cat([torch.tensor([100.0, 200.0, 200.0]), torch.arange(1.0, 17.0)])
    torch.testing.assert_close(tokens[0], expected[:, None].expand(-1, 32))


@pytest.mark.parametrize("position", POSITIONS)
def test_masked_patches_are_replaced_before_positions_are_added(position):
    model = tiny(mask_token=True, position=position).eval()
    nn.init.normal_(model.mask_token)
    images, mask = torch.randn(2, 3, 32, 48), torch.zeros(2, 2, 3, dtype=torch.bool)
    mask[0, 1, 2] = mask[1, 0, 0] = True
    seen: list[Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][:, 1:]))
    model(images)
    model(images, mask)
    with torch.no_grad():
        model.patch_embed.proj.weight.zero_()
        model.patch_embed.proj.bias.copy_(model.mask_token[0, 0])
    model(images)
    plain, masked, all_mask = seen
    torch.testing.assert_close(masked, torch.where(mask.flatten(1)[..., None], all_mask, plain))


def test_a_mask_without_a_mask_token_is_refused():
    with pytest.raises(ValueError, match="vit_tiny_p16 was built without a mask token"):
        tiny()(torch.randn(1, 3, 32, 32), torch.zeros(1, 2, 2, dtype=torch.bool))


@pytest.mark.parametrize("layer_scale", [0.0, 0.3])
def test_drop_path_drops_whole_branches_of_samples_in_training_alone(layer_scale):
    torch.manual_seed(0)
    block = Block(16, 2, 32, True, "mlp", layer_scale, drop_path=0.25).double()
    x = torch.randn(400, 3, 16).double()
    plain = block.eval()(x)
    assert torch.equal(block(x), plain)
    after_attention = x + block.attn(block.norm1(x)) * (layer_scale or 1.0) / 0.75
    dropped = block.train()(x)
    with torch.no_grad():
        block.mlp.fc2.weight.zero_()
        block.mlp.fc2.bias.zero_()
    torch.manual_seed(0)
    attended = block(x)
    kept = (attended - x).abs().amax(dim=(1, 2)) > 0
    torch.testing.assert_close(attended[kept], after_attention[kept])
    assert abs(kept.double().mean() - 0.75) < 0.08
    assert not torch.allclose(dropped, plain)


def test_drop_path_rises_linearly_from_0():
    assert [block.drop_path.rate for block in tiny(depth=5, drop_path=0.2).blocks] == pytest.approx(
        [0.0, 0.05, 0.1, 0.15, 0.2]
    )
    assert tiny(depth=1, drop_path=0.2).blocks[0].drop_path.rate == 0.0


def test_layer_scale_multiplies_each_channel_of_each_branch():
    torch.manual_seed(0)
    block, x = Block(16, 2, 32, True, "mlp", 1.0, 0.0).double(), torch.randn(2, 3, 16).double()
    assert isinstance(block.ls1, LayerScale)
    with torch.no_grad():
        block.ls1.gamma.copy_(torch.randn(16))
        block.ls2.gamma.copy_(torch.randn(16))
    after = x + block.ls1.gamma * block.attn(block.norm1(x))
    torch.testing.assert_close(block(x), after + block.ls2.gamma * block.mlp(block.norm2(after)))


def test_swiglu_equals_its_formula_and_has_dinov2s_width():
    assert SwiGLU(1536, 4 * 1536).w3.in_features == 4096
    layer, x = SwiGLU(12, 48).double(), torch.randn(2, 3, 12).double()
    first, second = layer.w12(x)[..., :32], layer.w12(x)[..., 32:]
    torch.testing.assert_close(layer(x), layer.w3(first * torch.sigmoid(first) * second))


def test_weight_decay_spares_tokens_the_position_table_and_layer_scales():
    spared = tiny(registers=1, mask_token=True, layer_scale=0.1, depth=1).no_weight_decay()
    tokens = {"cls_token", "register_tokens", "mask_token", "pos_embed"}
    assert spared == tokens | {"blocks.0.ls1.gamma", "blocks.0.ls2.gamma"}


def test_initial_values_are_dinos():
    model = tiny(embed_dim=256, num_heads=4, registers=4, layer_scale=0.1, mask_token=True)
    drawn = [model.pos_embed, model.cls_token, model.register_tokens, model.blocks[1].attn.qkv.weight]
    for parameter in drawn:
        assert parameter.std().item() == pytest.approx(0.02, rel=0.15)
        assert abs(parameter.mean().item()) < 0.004
    assert not model.blocks[1].attn.qkv.bias.any()
    assert not model.mask_token.any()
    assert (model.blocks[0].ls1.gamma == 0.1).all()


def test_sincos2d_equals_maes_as_lightly_computes_it():
    lightly = pytest.importorskip("lightly.models.utils")
    theirs = torch.from_numpy(lightly.get_2d_sine_cosine_positional_embedding(24, 9, cls_token=False))
    ours = sincos2d((9, 9), 24, torch.device("cpu"))
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=0, atol=1e-6)


def test_sincos2d_of_a_rectangle_is_a_part_of_the_squares_and_the_class_token_has_none():
    square = sincos2d((7, 7), 32, torch.device("cpu")).unflatten(0, (7, 7))
    assert torch.equal(sincos2d((3, 7), 32, torch.device("cpu")).unflatten(0, (3, 7)), square[:3])
    model, seen = tiny(position="sincos2d"), []
    nn.init.zeros_(model.patch_embed.proj.weight)
    nn.init.zeros_(model.patch_embed.proj.bias)
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
    model(torch.randn(1, 3, 48, 112))
    torch.testing.assert_close(seen[0], torch.cat([model.cls_token[0], square[:3].flatten(0, 1)]))


@pytest.mark.parametrize("options", [{}, {"position": "rope", "rope_shift": 0.5}, {"position": "sincos2d"}])
def test_copies_and_pickles_give_the_same_features(options):
    model = tiny(registers=1, layer_scale=0.5, **options).eval()
    images = torch.randn(1, 3, 48, 32)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(images).patches, model(images).patches)


def test_bfloat16_and_autocast_give_their_types_and_nearly_the_same_features():
    images = torch.randn(1, 3, 48, 32)
    for position in POSITIONS:
        model = tiny(position=position, registers=1, layer_scale=0.5).eval()
        exact = model(images).patches
        with torch.autocast("cpu", torch.bfloat16):
            mixed = model(images).patches
        half = model.bfloat16()(images.bfloat16()).patches
        assert half.dtype == torch.bfloat16
        for approximate in (mixed, half):
            torch.testing.assert_close(approximate.float(), exact, rtol=0, atol=0.15)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"position": "fourier"},
            "position of vit_tiny_p16 must be learned, sincos2d, rope or none, not 'fourier'",
        ),
        ({"ffn": "glu"}, "ffn of vit_tiny_p16 must be mlp or swiglu, not 'glu'"),
        ({"registers": -1}, "registers of vit_tiny_p16 must be 0 or more, not -1"),
        ({"layer_scale": -1.0}, "layer_scale of vit_tiny_p16 must be 0 or more"),
        ({"interpolate_offset": -0.1}, "interpolate_offset of vit_tiny_p16 must be 0 or more, not -0.1"),
        (
            {"position_size": 100},
            "position_size=100 of vit_tiny_p16 is not a multiple of patch=16; .* 96 or 112",
        ),
        ({"position_size": 8}, "position_size=8 of vit_tiny_p16 is not a multiple of patch=16; .* are 16"),
        ({"position": "sincos2d", "embed_dim": 30, "num_heads": 2}, "embed_dim=30 .* is not a multiple of 4"),
        ({"num_heads": 5}, "embed_dim=32 of vit_tiny_p16 is not a multiple of num_heads=5"),
        ({"patch": 0}, "patch of vit_tiny_p16 must be above 0, not 0"),
        ({"drop_path": 1.0}, "drop_path of vit_tiny_p16 must be from 0 to below 1"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        tiny(**options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rope_jitter": 2.0}, "rope_jitter=2.0 of vit_tiny_p16 would do nothing with position=learned"),
        ({"rope_base": 10.0, "position": "none"}, "rope_base=10.0 of vit_tiny_p16 would do nothing"),
        (
            {"interpolate_offset": 0.1, "position": "rope"},
            "interpolate_offset=0.1 of vit_tiny_p16 would do nothing",
        ),
        (
            {"interpolate_antialias": True, "position": "sincos2d"},
            "interpolate_antialias=True of vit_tiny_p16",
        ),
        (
            {"interpolate_offset": float("inf")},
            "interpolate_offset of vit_tiny_p16 must be 0 or more, not inf",
        ),
        ({"mlp_ratio": float("inf")}, "mlp_ratio of vit_tiny_p16 must be above 0, not inf"),
    ],
)
def test_an_option_that_would_do_nothing_or_is_infinite_is_refused(options, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        backbones.create("vit_tiny_p16", depth=1, **options)
