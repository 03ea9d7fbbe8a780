"""torchvision's networks behind the contract: equal to what their own classifiers see."""

import copy
import pickle
from functools import cache

import pytest
import torch
from torch import nn
from torchvision import models
from torchvision.ops import StochasticDepth

from nestling import backbones

FULL = [
    "resnet18",
    "regnet_x_400mf",
    "densenet121",
    "efficientnet_b0",
    "mobilenet_v2",
    "shufflenet_v2_x0_5",
    "mnasnet0_5",
    "convnext_tiny",
    "swin_t",
    "swin_v2_t",
    "googlenet",
    "squeezenet1_0",
    "vgg11",
]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in (*FULL[1:9], "swin_v2_t", "googlenet")]
CHEAP = ["resnet18", *SLOW]
# The classifier's first layer: what it sees is the image vector. (VGG and SqueezeNet flatten a map instead.)
FIRST = {
    "fc": ("resnet18", "regnet_x_400mf", "shufflenet_v2_x0_5", "googlenet"),
    "head": ("swin_t", "swin_v2_t"),
    "classifier": ("densenet121",),
    "classifier.1": ("efficientnet_b0", "mobilenet_v2", "mnasnet0_5"),
    "classifier.2": ("convnext_tiny",),
}
VIT = {"image_size": 32}


@cache
def built(name):
    torch.manual_seed(0)
    options = VIT if name.startswith("vit") else {}
    return backbones.create(f"torchvision:{name}", **options)


def adapted(name):
    return copy.deepcopy(built(name))


def images_for(size=(64, 96), channels=3):
    torch.manual_seed(1)
    return torch.randn(2, channels, *size)


@torch.no_grad()
@pytest.mark.parametrize("name", CHEAP)
def test_the_image_vector_is_what_the_classifier_sees(name):
    model = adapted(name).eval()
    torch.manual_seed(2)
    extra = {"aux_logits": False, "init_weights": True} if name == "googlenet" else {}
    original = models.get_model(name, weights=None, **extra).eval()
    missing, unexpected = original.load_state_dict(model.model.state_dict(), strict=False)
    first = next(layer for layer, names in FIRST.items() if name in names)
    assert not unexpected
    assert {key.rpartition(".")[0] for key in missing} == {first}
    seen = []
    original.get_submodule(first).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    images = images_for()
    original(images)
    features = model(images)
    torch.testing.assert_close(features.cls, seen[0])
    assert features.grid == (2, 3)
    assert features.patches.shape == (2, 6, model.embed_dim)
    if name != "convnext_tiny":  # whose norm follows the mean
        torch.testing.assert_close(features.patches.mean(1), features.cls)


@torch.no_grad()
def test_patches_lie_row_major():
    model = adapted("resnet18").eval()
    x = images_for()
    for layer in ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4"):
        x = model.model.get_submodule(layer)(x)
    torch.testing.assert_close(model(images_for()).patches[:, 4], x[:, :, 1, 1])


@torch.no_grad()
@pytest.mark.slow
def test_a_vision_transformer_gives_its_class_token_and_its_last_attention():
    model = adapted("vit_b_16").eval()
    original = models.vit_b_16(weights=None, image_size=32).eval()
    original.heads = nn.Identity()
    original.load_state_dict({key.removeprefix("model."): v for key, v in model.state_dict().items()})
    images = images_for((32, 32))
    features = model(images)
    torch.testing.assert_close(features.cls, original(images))
    assert features.grid == (2, 2)
    inputs = []
    layer = model.model.encoder.layers[-1]
    handle = layer.self_attention.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    model(images)
    handle.remove()
    attention = layer.self_attention
    projected = nn.functional.linear(inputs[0], attention.in_proj_weight, attention.in_proj_bias)
    query, key, _ = projected.unflatten(-1, (3, 12, 64)).unbind(2)
    weights = torch.softmax(torch.einsum("bhd,bnhd->bhn", query[:, 0], key) / 8, -1)
    torch.testing.assert_close(model.attention(images).flatten(2), weights[..., 1:])
    assert [tuple(level.shape[2:]) for level in model.pyramid(images)] == [(8, 8), (4, 4), (2, 2), (1, 1)]
    with pytest.raises(ValueError, match=r"torchvision:vit_b_16 takes no images of 96 x 96 .* is 32 x 32"):
        model.check_size(96, 96)
    assert {"model.class_token", "model.encoder.pos_embedding"} <= model.no_weight_decay()


@pytest.mark.parametrize("name", ["resnet18", *(pytest.param(n, marks=pytest.mark.slow) for n in FULL[1:])])
def test_it_can_be_a_student_and_a_teacher(name):
    model = adapted(name).train()
    features = model(images_for())
    (features.cls.square().sum() + features.patches.square().sum()).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
    model.eval()
    with torch.no_grad():
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(twin(images_for()).cls, model(images_for()).cls)


@torch.no_grad()
@pytest.mark.parametrize("name", ["resnet18", *(pytest.param(n, marks=pytest.mark.slow) for n in FULL[1:])])
def test_the_pyramid_has_strides_4_8_16_and_32(name):
    model = adapted(name).eval()
    for size in [(64, 96), (97, 131), (model.min_size, model.min_size)]:
        levels = model.pyramid(images_for(size))
        expected = [(-(-size[0] // s), -(-size[1] // s)) for s in (4, 8, 16, 32)]
        assert [tuple(level.shape[2:]) for level in levels] == expected


@torch.no_grad()
def test_the_pyramid_of_a_resnet_holds_its_stages():
    model = adapted("resnet18").eval()
    levels = model.pyramid(images_for())
    x = images_for()
    for layer in ("conv1", "bn1", "relu", "maxpool"):
        x = model.model.get_submodule(layer)(x)
    for number, level in enumerate(levels, start=1):
        x = model.model.get_submodule(f"layer{number}")(x)
        torch.testing.assert_close(level, x)


def test_the_smallest_sizes_are_those_that_torchvision_takes():
    assert adapted("resnet18").min_size == 1
    model = adapted("vgg11")
    assert model.min_size == 32
    with pytest.raises(ValueError, match=r"torchvision:vgg11 takes no images of 20 x 64 .* is 32 x 64"):
        model(torch.zeros(1, 3, 20, 64))


@pytest.mark.parametrize("name", ["convnext_tiny", "swin_t"])
def test_drop_path_is_the_last_blocks_and_rises_from_the_first(name):
    with torch.device("meta"):
        model = backbones.create(f"torchvision:{name}", drop_path=0.3)
    rates = [layer.p for layer in model.modules() if isinstance(layer, StochasticDepth)]
    assert rates == sorted(rates)
    assert rates[0] == 0
    assert rates[-1] == pytest.approx(0.3)
    with torch.device("meta"):
        model = backbones.create(f"torchvision:{name}")  # torchvision's own default is above 0
    assert not any(layer.p for layer in model.modules() if isinstance(layer, StochasticDepth))


def test_other_channels_rebuild_the_first_convolution_with_its_spread():
    torch.manual_seed(0)
    model = backbones.create("torchvision:resnet18", in_chans=5)
    assert model.model.conv1.weight.shape == (64, 5, 7, 7)
    spread = adapted("resnet18").model.conv1.weight.std().item()
    assert model.model.conv1.weight.std().item() == pytest.approx(spread, rel=0.1)
    assert model(images_for(channels=5)).cls.shape == (2, 512)


def test_weight_decay_spares_layer_scales_and_bias_tables():
    with torch.device("meta"):
        convnext = backbones.create("torchvision:convnext_tiny").no_weight_decay()
        swin = backbones.create("torchvision:swin_t").no_weight_decay()
    assert len([key for key in convnext if key.endswith("layer_scale")]) == 18
    assert len([key for key in swin if key.endswith("relative_position_bias_table")]) == 12
    assert len(swin) == 12


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet5", {}, "no classification model 'resnet5'; did you mean resnet50"),
        ("qqq", {}, "known are alexnet"),
        ("fasterrcnn_resnet50_fpn", {}, "no classification model"),
        ("resnet18", {"widht": 2}, "torchvision:resnet18 has no option 'widht'"),
        ("resnet18", {"groups": 3}, "can't be built: ValueError"),
        ("resnet18", {"drop_path": 0.1}, "torchvision:resnet18 has no drop path"),
        ("resnet18", {"weights": "DEFAULT"}, "weights .* never fetched"),
        ("resnet18", {"num_classes": 5}, "num_classes .* left out"),
        ("swin_t", {"stochastic_depth_prob": 0.1}, "own option is drop_path"),
        ("resnet18", {"in_chans": 0}, "in_chans"),
    ],
)
def test_what_makes_no_backbone_is_refused_in_a_sentence(name, options, message):
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        backbones.create(f"torchvision:{name}", **options)


def test_attention_and_masks_are_refused_where_there_are_none():
    model = adapted("resnet18")
    with pytest.raises(ValueError, match="torchvision:resnet18 has no class-token attention"):
        model.attention(images_for())
    with pytest.raises(ValueError, match="torchvision:resnet18 has no mask token"):
        model(images_for(), torch.zeros(2, 2, 3, dtype=torch.bool))


def test_on_the_meta_device_no_random_number_is_drawn_though_regnet_computes_while_built():
    before = torch.get_rng_state()
    with torch.device("meta"):
        model = backbones.create("torchvision:regnet_x_400mf")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), before)
