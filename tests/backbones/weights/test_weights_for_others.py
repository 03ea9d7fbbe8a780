"""Our networks handed to timm and transformers: loaded strictly there, with equal features in float64."""

import json

import pytest
import torch
from foreign_networks import images, largest, stirred
from safetensors.torch import save_file

from nestling import backbones
from nestling.backbones.weights.huggingface import to_huggingface
from nestling.backbones.weights.timm import to_timm

VIT = {"depth": 2}
SWIN = {"embed_dim": 24, "depth": 2}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def ours(name, **options):
    torch.manual_seed(0)
    return stirred(backbones.create(name, **options))


TO_TIMM = [
    ("xcit_nano_12_p16", {"depth": 3}),
    ("xcit_tiny_24_p8", {"depth": 2}),
    ("xcit_tiny_12_p16", {"depth": 2, "cls_depth": 3, "in_chans": 2, "mlp_ratio": 2.5, "mask_token": True}),
    ("vit_tiny_p16", VIT),
    ("vit_tiny_p16", {**VIT, "position": "none", "qkv_bias": False}),
    ("vit_tiny_p8", {**VIT, "position_size": 64, "mlp_ratio": 1.7, "in_chans": 1, "pyramid": True}),
    ("vit_small_p16", {**VIT, "layer_scale": 1e-5, "num_heads": 3}),
    ("vit_tiny_p14", {**VIT, "layer_scale": 1e-5, "registers": 4, "mask_token": True}),
    ("vit_giant_p14", {**VIT, "embed_dim": 128, "num_heads": 2}),
    ("vit_tiny_p16", {**VIT, "ffn": "swiglu", "registers": 1}),
    ("swin_tiny_w7", SWIN),
    ("swin_tiny_w14", {**SWIN, "in_chans": 1}),
    ("swin_tiny_w7", {**SWIN, "position": "none", "qkv_bias": False, "mlp_ratio": 2.0, "pyramid": True}),
]


@pytest.mark.parametrize(("name", "options"), TO_TIMM)
def test_timm_loads_ours_strictly_with_equal_features(name, options):
    timm = pytest.importorskip("timm")
    network = ours(name, **options)
    model = to_timm(network)
    theirs = timm.create_model(model.name, num_classes=0, **model.arguments).eval()
    theirs.load_state_dict(model.tensors, strict=True)
    x = images(options.get("position_size", 224), channels=options.get("in_chans", 3))
    features, tokens = network.double()(x), theirs.double().forward_features(x)
    if name.startswith("swin"):
        assert largest(features.patches - tokens.flatten(1, 2)) < 1e-9
    else:
        assert largest(features.cls - tokens[:, 0]) < 1e-9
        assert largest(features.patches - tokens[:, -features.patches.shape[1] :]) < 1e-9


def test_timms_arguments_are_plain_types_and_the_backbone_is_untouched():
    network = ours("vit_tiny_p14", **VIT, registers=2)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    model = to_timm(network)
    assert json.loads(json.dumps(model.arguments)) == model.arguments
    to_huggingface(network)
    assert network.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())


@pytest.mark.parametrize("size", [96, 160, (96, 128)])
def test_timm_agrees_at_other_sizes_where_positions_are_functions_of_the_grid(size):
    timm = pytest.importorskip("timm")
    for name, options in (
        ("xcit_nano_12_p16", VIT),
        ("vit_tiny_p16", {**VIT, "interpolate_antialias": True}),
    ):
        network = ours(name, **options)
        model = to_timm(network)
        theirs = timm.create_model(model.name, num_classes=0, **model.arguments).eval()
        theirs.load_state_dict(model.tensors, strict=True)
        x = images(*(size if isinstance(size, tuple) else (size,)))
        difference = network.double()(x).cls - theirs.double().forward_features(x)[:, 0]
        assert largest(difference) < (1e-9 if name.startswith("xcit") else 1e-5)  # timm resizes in fp32


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("xcit_nano_12_p4", {}, "patch=4 of xcit_nano_12_p4"),
        ("xcit_nano_12_p16", {"stem": "linear"}, "stem='linear'"),
        ("vit_tiny_p16", {"position": "rope"}, "position='rope'"),
        ("vit_tiny_p16", {"position": "sincos2d"}, "position='sincos2d'"),
        ("swin_tiny_w7", {"position": "absolute"}, "position='absolute'"),
        ("swin_tiny_w7", {"position": "both"}, "position='both'"),
    ],
)
def test_what_timm_can_not_hold_is_refused(name, options, message):
    with pytest.raises(ValueError, match=f"{message}.*no form in timm"):
        to_timm(backbones.create(name, depth=2, **options))


TO_HUGGING_FACE = [
    ("ViTModel", "vit_tiny_p16", {**VIT, "mask_token": True}),
    (
        "ViTModel",
        "vit_tiny_p8",
        {**VIT, "position_size": 64, "mlp_ratio": 1.7, "num_heads": 6, "in_chans": 1},
    ),
    ("Dinov2Model", "vit_tiny_p14", {**VIT, "layer_scale": 1e-5, "mask_token": True}),
    ("Dinov2Model", "vit_giant_p14", {**VIT, "embed_dim": 128, "num_heads": 2}),
    ("Dinov2Model", "vit_tiny_p16", {**VIT, "ffn": "swiglu", "qkv_bias": False}),
    ("Dinov2WithRegistersModel", "vit_tiny_p14", {**VIT, "layer_scale": 1e-5, "registers": 4}),
    (
        "Dinov2WithRegistersModel",
        "vit_tiny_p16",
        {**VIT, "registers": 2, "mask_token": True, "pyramid": True},
    ),
    ("SwinModel", "swin_tiny_w7", {**SWIN, "mask_token": True}),
    ("SwinModel", "swin_tiny_w7", {**SWIN, "position": "both", "mlp_ratio": 2.0}),
    ("SwinModel", "swin_tiny_w7", {**SWIN, "position": "absolute", "qkv_bias": False}),
    pytest.param(
        "SwinModel",
        "swin_tiny_w14",
        {**SWIN, "position": "both", "position_size": 448},
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("kind", "name", "options"), TO_HUGGING_FACE)
def test_transformers_loads_ours_with_equal_features(kind, name, options, tmp_path):
    transformers = pytest.importorskip("transformers")
    network = ours(name, **options)
    model = to_huggingface(network)
    (tmp_path / "config.json").write_text(json.dumps(model.config))
    save_file(
        {key: value.contiguous() for key, value in model.tensors.items()}, tmp_path / "model.safetensors"
    )
    without_pooler = {"add_pooling_layer": False} if kind in ("ViTModel", "SwinModel") else {}
    theirs, info = getattr(transformers, kind).from_pretrained(
        tmp_path, output_loading_info=True, **without_pooler
    )
    assert not any(info.values()), info
    assert model.config["architectures"] == [kind]
    size = options.get("position_size", 224)
    x = images(size, channels=options.get("in_chans", 3))
    features, tokens = network.double()(x), theirs.eval().double()(x).last_hidden_state
    assert largest(features.patches - tokens[:, -features.patches.shape[1] :]) < 1e-9
    if kind != "SwinModel":
        assert largest(features.cls - tokens[:, 0]) < 1e-9
    again, _ = backbones.load(tmp_path)
    assert largest(again.double()(x).patches - features.patches) < 1e-9


def test_a_swin_of_window_14_is_for_larger_images_in_transformers():
    model = to_huggingface(ours("swin_tiny_w14", **SWIN), size=448)
    assert (model.config["image_size"], model.config["window_size"]) == (448, 14)


def test_a_swin_for_larger_images_keeps_its_tables_in_timm():
    timm = pytest.importorskip("timm")
    network = ours("swin_tiny_w14", **SWIN)
    model = to_timm(network, size=448)
    theirs = timm.create_model(model.name, num_classes=0, **model.arguments)
    theirs.load_state_dict(model.tensors, strict=True)
    assert {table.shape[0] for key, table in model.tensors.items() if "bias_table" in key} == {27 * 27}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("xcit_nano_12_p16", {}, "is an XCiT, which transformers does not have"),
        ("vit_tiny_p16", {"position": "rope"}, "position='rope'"),
        ("vit_tiny_p16", {"layer_scale": 1e-5, "mlp_ratio": 1.7}, "mlp_ratio=.*whole ones"),
        ("swin_tiny_w14", {}, "window=14.*below 448 pixels"),
    ],
)
def test_what_transformers_can_not_hold_is_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        to_huggingface(backbones.create(name, depth=2, **options))


def test_the_window_that_transformers_refuses_does_fail_there():
    transformers = pytest.importorskip("transformers")
    config = transformers.SwinConfig(embed_dim=24, depths=[2, 2, 2, 2], window_size=14)
    with pytest.raises(RuntimeError):
        transformers.SwinModel(config).eval()(torch.zeros(1, 3, 224, 224))


@pytest.mark.parametrize("convert", [to_timm, to_huggingface])
def test_a_network_of_no_family_is_refused(convert):
    class Other(backbones.Backbone):
        name = "other"

        def forward(self, images, mask=None):
            raise NotImplementedError

        pyramid = attention = forward

    with pytest.raises(ValueError, match="other is no ViT, Swin or XCiT"):
        convert(Other())
