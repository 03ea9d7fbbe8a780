"""timm's networks behind the contract: equal to timm's own outputs, at every size they take."""

import builtins
import copy
import pickle
from functools import cache

import pytest
import timm
import torch

from nestling import backbones
from nestling.backbones.adapters.timm import Timm

VIT = {"embed_dim": 32, "depth": 2, "num_heads": 2}
SMALL = {
    "timm:vit_small_patch16_224": VIT,
    "timm:vit_small_patch16_dinov3": VIT,
    "timm:deit_tiny_distilled_patch16_224": VIT,
    "timm:xcit_nano_12_p16_224": VIT,
    "timm:swin_tiny_patch4_window7_224": {"embed_dim": 16, "depths": (1, 1, 2, 1), "num_heads": (1, 1, 2, 2)},
    "timm:swinv2_tiny_window8_256": {"embed_dim": 16, "depths": (1, 1, 2, 1), "num_heads": (1, 1, 2, 2)},
    "timm:convnext_atto": {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)},
    "timm:resnet10t": {},
    "timm:test_vit": {},
    "timm:mobilenetv3_small_050": {},
}


@cache
def built(name):
    torch.manual_seed(0)
    return backbones.create(name, **SMALL.get(name, {}))


def small(name, **options):
    if not options:
        return copy.deepcopy(built(name))
    return backbones.create(name, **{**SMALL.get(name, {}), **options})


def images_for(size=(64, 96), channels=3):
    torch.manual_seed(1)
    return torch.randn(2, channels, *size)


@torch.no_grad()
@pytest.mark.parametrize("name", SMALL)
def test_the_image_vector_is_timms_and_patches_lie_row_major(name):
    model = small(name).eval()
    images = images_for()
    features = model(images)
    rows, columns = features.grid
    assert model.name == name
    assert (rows, columns) == (64 // model.stride, 96 // model.stride)
    assert features.cls.shape == (2, model.embed_dim)
    assert features.patches.shape == (2, rows * columns, model.embed_dim)
    pooled = model.model(images)
    expected = pooled if pooled.shape == features.cls.shape else features.patches.mean(1)
    torch.testing.assert_close(features.cls, expected)
    tokens = model.model.forward_features(images)
    if tokens.ndim == 3:
        expected = tokens[:, -rows * columns :]
    else:
        expected = (
            tokens.flatten(1, 2) if model.model.__class__.__name__[:4] == "Swin" else tokens.flatten(2).mT
        )
    if name == "timm:convnext_atto":
        norm = model.model.head.norm
        expected = torch.nn.functional.layer_norm(
            expected, norm.weight.shape, norm.weight, norm.bias, norm.eps
        )
    torch.testing.assert_close(features.patches, expected)


@pytest.mark.parametrize("name", SMALL)
def test_it_can_be_a_student_and_a_teacher(name):
    model = small(name).train()
    features = model(images_for())
    (features.cls.square().sum() + features.patches.square().sum()).backward()
    for key, parameter in model.named_parameters():
        assert not parameter.requires_grad or parameter.grad.isfinite().all(), key
    model.eval()
    with torch.no_grad():
        other = small(name).eval()
        for parameter in other.parameters():
            parameter.add_(1)
        other.load_state_dict(model.state_dict(), strict=True)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), other):
            assert torch.equal(twin(images_for()).cls, model(images_for()).cls)


@torch.no_grad()
@pytest.mark.parametrize("name", SMALL)
def test_the_pyramid_has_strides_4_8_16_and_32(name):
    model = small(name).eval()
    sizes = [(64, 96), (97, 131), (model.min_size, model.min_size)]
    for size in sizes:
        try:
            model.check_size(*size)
        except ValueError:
            assert size == (97, 131)
            continue
        levels = model.pyramid(images_for(size))
        expected = [(-(-size[0] // s), -(-size[1] // s)) for s in (4, 8, 16, 32)]
        assert [tuple(level.shape[2:]) for level in levels] == expected


def test_only_an_unused_head_is_frozen():
    frozen = [key for key, p in small("timm:mobilenetv3_small_050").named_parameters() if not p.requires_grad]
    assert frozen == ["model.conv_head.weight", "model.conv_head.bias"]
    assert all(p.requires_grad for p in small("timm:levit_128s").parameters())  # caches biases in evaluation


@pytest.mark.parametrize(
    ("name", "size", "nearest"),
    [
        ("timm:vit_small_patch16_224", (97, 131), "96 x 128"),
        ("timm:vit_small_patch16_224", (3, 16), "16 x 16"),
        ("timm:swin_tiny_patch4_window7_224", (33, 3), "32 x 4"),
        ("timm:mixer_s32_224", (100, 224), "224 x 224"),
    ],
)
def test_a_size_it_cannot_take_is_refused_with_the_nearest_that_works(name, size, nearest):
    model = small(name)
    message = rf"{name} takes no images of {size[0]} x {size[1]} .* is {nearest}$"
    with pytest.raises(ValueError, match=message):
        model.check_size(*size)
    with pytest.raises(ValueError, match=message):
        model(torch.zeros(1, 3, *size))
    model.check_size(*map(int, nearest.split(" x ")))


def test_a_failure_that_size_does_not_explain_stays_what_it_is():
    with pytest.raises(RuntimeError, match="channels"):
        small("timm:vit_small_patch16_224")(torch.zeros(1, 4, 32, 32))


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    ["timm:vit_small_patch16_224", "timm:vit_small_patch16_dinov3", "timm:deit_tiny_distilled_patch16_224"],
)
def test_attention_is_that_of_timms_last_block(name):
    model = small(name).double().eval()
    images = images_for().double()
    attn = model.model.blocks[-1].attn
    seen = []
    handle = attn.proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    maps = model.attention(images)
    handle.remove()
    assert maps.shape == (2, 2, 4, 6)
    assert (maps.sum((-2, -1)) < 1).all()
    # moving a patch's value moves the class token's output by its weight
    size = model.embed_dim // 2
    values = torch.randn(2, 24, model.embed_dim).double()
    hooked = _class_output_with_values(model, images, values)
    plain = _class_output_with_values(model, images, values * 0)
    expected = torch.einsum("bhn,bnhd->bhd", maps.flatten(2), values.unflatten(-1, (2, size))).flatten(1)
    torch.testing.assert_close(hooked - plain, expected)


def _class_output_with_values(model, images, values):
    """What the class token gathers in the last block where the patches' values are the given ones."""
    attn = model.model.blocks[-1].attn
    outputs = []

    def replace(_, __, qkv):
        qkv = qkv.clone()
        qkv[:, -24:, -model.embed_dim :] = values
        return qkv

    handles = [
        attn.qkv.register_forward_hook(replace),
        attn.proj.register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0][:, 0])),
    ]
    model.model.forward_features(images)
    for handle in handles:
        handle.remove()
    return outputs[0]


@torch.no_grad()
def test_attention_of_xcit_is_our_own_xcits():
    """Class attention of timm's XCiT, against its unfused path."""
    model = small("timm:xcit_nano_12_p16_224").double().eval()
    images = images_for().double()
    maps = model.attention(images)
    attn = model.model.cls_attn_blocks[-1].attn
    inputs = []
    handle = attn.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    model(images)
    handle.remove()
    query, key = (layer(inputs[0]).unflatten(-1, (2, -1)) for layer in (attn.q, attn.k))
    weights = torch.softmax(torch.einsum("bhd,bnhd->bhn", query[:, 0], key) * attn.scale, -1)
    torch.testing.assert_close(maps.flatten(2), weights[..., 1:])


@pytest.mark.parametrize("name", ["timm:swin_tiny_patch4_window7_224", "timm:resnet10t"])
def test_attention_and_masks_are_refused_where_there_are_none(name):
    model = small(name)
    assert not model.has_attention
    with pytest.raises(ValueError, match=f"{name} has no class-token attention"):
        model.attention(images_for())
    with pytest.raises(ValueError, match=f"{name} has no mask token"):
        model(images_for(), torch.zeros(2, 4, 6, dtype=torch.bool))


def test_weight_decay_spares_what_timms_patterns_and_the_contract_name():
    xcit = small("timm:xcit_nano_12_p16_224").no_weight_decay()
    assert {"model.cls_token", "model.blocks.0.attn.temperature", "model.blocks.1.gamma3"} <= xcit
    assert "model.pos_embed.token_projection.weight" in xcit  # timm's pattern pos_embed.*
    assert "model.blocks.0.attn.qkv.weight" not in xcit
    vit = small("timm:vit_small_patch16_224").no_weight_decay()
    assert {"model.cls_token", "model.pos_embed"} <= vit
    swin = small("timm:swin_tiny_patch4_window7_224")
    tables = {key for key, _ in swin.named_parameters() if key.endswith("relative_position_bias_table")}
    assert len(tables) == 5
    assert tables <= swin.no_weight_decay() <= dict(swin.named_parameters()).keys()


def test_drop_path_and_channels_reach_timm():
    model = small("timm:vit_small_patch16_224", drop_path=0.3, in_chans=4)
    assert model.model.blocks[-1].drop_path1.drop_prob == pytest.approx(0.3)
    assert model(images_for(channels=4)).cls.shape == (2, 32)
    swin = small("timm:swin_tiny_patch4_window7_224")  # timm's own default is 0.1
    assert all(getattr(m, "drop_prob", 0.0) == 0 for m in swin.modules())


def test_options_override_our_defaults():
    fixed = small("timm:vit_small_patch16_224", dynamic_img_size=False, img_size=64)
    assert fixed.min_size == 64
    with pytest.raises(ValueError, match="64 x 64"):
        fixed.check_size(96, 96)
    pooled = small("timm:vit_small_patch16_224", global_pool="avg").eval()
    features = pooled(images_for())
    assert pooled.has_attention
    torch.testing.assert_close(features.cls, pooled.model(images_for()))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "timm:vit_smal_patch16_224",
            {},
            "no model 'vit_smal_patch16_224'; did you mean vit_small_patch16_224",
        ),
        ("timm:", {}, "no model ''"),
        ("timm:hf-hub:timm/vit", {}, "no model 'hf-hub:timm/vit'"),
        ("timm:vit_small_patch16_224", {"depht": 2}, "timm:vit_small_patch16_224 has no option 'depht'"),
        ("timm:vit_small_patch16_224", {"depth": "two"}, "can't be built: TypeError"),
        ("timm:vit_small_patch16_224", {"num_classes": 10}, "num_classes .* classifier is always left out"),
        ("timm:vit_small_patch16_224", {"pretrained": True}, "pretrained .* never fetched"),
        ("timm:vit_small_patch16_224", {"drop_path_rate": 0.1}, "own option is drop_path"),
        ("timm:vit_small_patch16_224", {"drop_path": 1.5}, "drop_path .* from 0 to below 1, not 1.5"),
        ("timm:vit_small_patch16_224", {"in_chans": 0}, "in_chans"),
        ("timm:vgg11", {"drop_path": 0.1}, "timm:vgg11 has no drop path, so drop_path must be 0, not 0.1"),
        ("timm:crossvit_9_240", {}, "ends in a list of a tensor of shape .* not in one map of patches"),
    ],
)
def test_what_makes_no_backbone_is_refused_in_a_sentence(name, options, message):
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        backbones.create(name, **options)


def test_without_timm_the_extra_is_named(monkeypatch):
    real = builtins.__import__

    def without_timm(name, *rest, **keywords):
        if name == "timm":
            raise ModuleNotFoundError("No module named 'timm'", name="timm")
        return real(name, *rest, **keywords)

    monkeypatch.setattr(builtins, "__import__", without_timm)
    with pytest.raises(ValueError, match=r"timm:resnet18 needs timm.*pip install 'nestling\[timm\]'"):
        backbones.create("timm:resnet18")


def test_building_draws_the_random_numbers_of_timm_alone_and_none_on_the_meta_device():
    torch.manual_seed(0)
    timm.create_model("test_vit", num_classes=0)
    expected = torch.get_rng_state()
    torch.manual_seed(0)
    assert isinstance(backbones.create("timm:test_vit"), Timm)
    assert torch.equal(torch.get_rng_state(), expected)
    with torch.device("meta"):
        backbones.create("timm:test_vit")
    assert torch.equal(torch.get_rng_state(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["timm:test_vit", "timm:resnet10t", "timm:convnext_atto"])
def test_the_whole_graph_compiles_to_the_same_outputs(name):
    torch.compiler.reset()
    model = small(name).eval()
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(images_for()).patches, model(images_for()).patches)
