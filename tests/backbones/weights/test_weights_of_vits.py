"""Every layout of a ViT: saved as users have it, loaded, and compared in float64 with its own library."""

import argparse
import json

import pytest
import torch
from foreign_networks import images, largest, stirred
from safetensors.torch import save_file

from nestling import backbones

SMALL = {"depth": 2, "embed_dim": 128, "num_heads": 2}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def differences(backbone, tokens, size=224):
    """Ours against all of another network's normalised tokens, the class first."""
    features = backbone.double()(images(size))
    return max(
        largest(features.cls - tokens[:, 0]),
        largest(features.patches - tokens[:, -features.patches.shape[1] :]),
    )


def ours(**options):
    torch.manual_seed(0)
    return stirred(backbones.create("vit_tiny_p16", **{**SMALL, **options}))


def saved(path, content):
    torch.save(content, path)
    return path


TIMM = {
    "plain": ("vit_tiny_patch16_224", {}),
    "classifier": ("vit_small_patch16_224", {"num_classes": 7}),
    "layer scale": ("vit_tiny_patch16_224", {"init_values": 1e-5}),
    "no bias": ("vit_tiny_patch16_224", {"qkv_bias": False}),
    "narrow": ("vit_tiny_patch16_224", {"mlp_ratio": 1.7}),
    "four channels": ("vit_tiny_patch16_224", {"in_chans": 4}),
    "registers": ("vit_small_patch14_reg4_dinov2", {"img_size": 224, "num_classes": 3}),
    "registers in the table": ("vit_tiny_patch16_224", {"reg_tokens": 4}),
    "gated": ("vit_giant_patch14_dinov2", {"img_size": 224, "embed_dim": 192, "num_heads": 3}),
    "larger table": ("vit_small_patch14_dinov2", {"img_size": 280}),
}


@pytest.mark.parametrize("case", TIMM)
def test_timm(case, tmp_path):
    timm = pytest.importorskip("timm")
    name, options = TIMM[case]
    theirs = stirred(timm.create_model(name, **{"num_classes": 0, **SMALL, **options}))
    backbone, report = backbones.load(saved(tmp_path / "timm.pth", theirs.state_dict()))
    size = theirs.patch_embed.img_size[0]
    x = images(size, channels=options.get("in_chans", 3))
    tokens, features = theirs.double().forward_features(x), backbone.double()(x)
    tolerance = 1e-6 if case == "registers in the table" else 1e-9  # their two addends are one, in fp32
    assert largest(features.cls - tokens[:, 0]) < tolerance
    assert largest(features.patches - tokens[:, theirs.num_prefix_tokens :]) < tolerance
    assert report.layout == (
        "DINO" if case in ("plain", "no bias", "narrow", "four channels") else "timm ViT"
    )
    assert report.unexpected == (("head.weight", "head.bias") if options.get("num_classes") else ())


@pytest.mark.parametrize("size", [112, 256])
def test_timm_at_other_sizes_too(size, tmp_path):
    timm = pytest.importorskip("timm")
    theirs = stirred(timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True, **SMALL))
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "vit_tiny_patch16_224"}))
    backbone, report = backbones.load(tmp_path)
    tokens = theirs.double().forward_features(images(size))
    assert differences(backbone, tokens, size) < 1e-5  # timm resizes its table in fp32
    assert report.layout == "timm ViT"


def test_timms_config_tells_its_headless_files_from_dinos(tmp_path):
    save_file(ours().state_dict(), tmp_path / "model.safetensors")
    backbone, report = backbones.load(tmp_path)
    assert (report.layout, backbone.offset, backbone.antialias) == ("DINO", 0.1, False)
    assert "interpolate_antialias=True" in str(report)
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "vit_tiny_patch16_224"}))
    backbone, report = backbones.load(tmp_path)
    assert (report.layout, backbone.offset, backbone.antialias) == ("timm ViT", 0.0, True)


def test_timms_norm_after_pooling_normalises_the_tokens(tmp_path):
    timm = pytest.importorskip("timm")
    theirs = stirred(timm.create_model("vit_tiny_patch16_224", num_classes=2, global_pool="avg", **SMALL))
    backbone, report = backbones.load(saved(tmp_path / "a.pth", theirs.state_dict()))
    tokens = theirs.double().fc_norm(theirs.forward_features(images()))
    assert differences(backbone, tokens) < 1e-9
    assert "fc_norm" in str(report)


@pytest.mark.parametrize(
    ("name", "options", "key"),
    [
        ("vit_tiny_patch16_224", {"qk_norm": True}, "q_norm"),
        ("vit_base_patch16_clip_224", {}, "norm_pre"),
        ("vit_tiny_patch16_224", {"class_token": False, "global_pool": "avg"}, "cls_token"),
        ("deit_tiny_distilled_patch16_224", {}, "pos_embed"),
    ],
)
def test_a_network_of_timm_that_is_another_one_is_refused(name, options, key, tmp_path):
    timm = pytest.importorskip("timm")
    theirs = timm.create_model(name, num_classes=3, **{**SMALL, **options})
    with pytest.raises(ValueError, match=rf"a\.pth.*{key}"):
        backbones.load(saved(tmp_path / "a.pth", theirs.state_dict()))


@pytest.mark.parametrize("old_names", [False, True])
def test_torchvision(old_names, tmp_path):
    torchvision = pytest.importorskip("torchvision")
    theirs = stirred(torchvision.models.VisionTransformer(224, 16, 2, 2, 128, 512, num_classes=5))
    state = theirs.state_dict()
    if old_names:  # of its first release
        state = {
            key.replace("mlp.0", "mlp.linear_1").replace("mlp.3", "mlp.linear_2"): x
            for key, x in state.items()
        }
    backbone, report = backbones.load(saved(tmp_path / "vit.pth", state))
    theirs = theirs.double()
    x = theirs._process_input(images())
    tokens = theirs.encoder(torch.cat([theirs.class_token.expand(len(x), -1, -1), x], dim=1))
    assert differences(backbone, tokens) < 1e-9
    assert report.layout == "torchvision ViT"
    assert report.unexpected == ("heads.head.weight", "heads.head.bias")
    assert (backbone.offset, backbone.antialias) == (0.0, False)


HF = {
    "ViT": ("ViTModel", {"layer_norm_eps": 1e-6}),
    "ViT for images": ("ViTForImageClassification", {"layer_norm_eps": 1e-6, "num_labels": 3}),
    "DINOv2": ("Dinov2Model", {"patch_size": 14, "image_size": 280}),
    "gated DINOv2": ("Dinov2Model", {"use_swiglu_ffn": True, "image_size": 224}),
    "DINOv2 with registers": ("Dinov2WithRegistersModel", {"num_register_tokens": 3, "qkv_bias": False}),
}


def huggingface(case, **options):
    transformers = pytest.importorskip("transformers")
    name, further = HF[case]
    kind = getattr(transformers, name)
    shape = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    if name.startswith("ViT"):
        shape["intermediate_size"] = 512
    return stirred(kind(kind.config_class(**{**shape, **further, **options})))


def huggingface_tokens(theirs, x):
    base = getattr(theirs, theirs.base_model_prefix, theirs)
    return base.double()(x).last_hidden_state


@pytest.mark.parametrize("form", ["folder", "bin", "in memory"])
@pytest.mark.parametrize("case", HF)
def test_hugging_face(case, form, tmp_path):
    theirs = huggingface(case)
    if form == "folder":
        theirs.save_pretrained(tmp_path)
    else:  # transformers writes safetensors only; scripts save what is in memory
        theirs.config.save_pretrained(tmp_path)
        torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    path = tmp_path / "pytorch_model.bin" if form == "in memory" else tmp_path
    backbone, report = backbones.load(path)
    size = theirs.config.image_size
    tokens = huggingface_tokens(theirs, images(size))
    assert differences(backbone, tokens, size) < 1e-9
    assert report.layout == "Hugging Face " + case.replace(" for images", "").replace("gated ", "")
    assert "epsilon" not in str(report)


def test_hugging_faces_registers_are_read_at_other_sizes_as_trained(tmp_path):
    theirs = huggingface("DINOv2 with registers")
    theirs.save_pretrained(tmp_path)
    backbone, _ = backbones.load(tmp_path)
    assert differences(backbone, huggingface_tokens(theirs, images(96)), 96) < 1e-5
    assert (backbone.offset, backbone.antialias) == (0.0, True)


def test_heads_of_an_unusual_width_are_assumed_and_told(tmp_path):
    state = huggingface("ViT").state_dict()
    backbone, report = backbones.load(saved(tmp_path / "a.bin", state))
    assert backbone.blocks[0].attn.num_heads == 2
    assert "num_heads assumed to be width / 64 = 2" in str(report)
    backbone, report = backbones.load(saved(tmp_path / "a.bin", state), num_heads=4)
    assert backbone.blocks[0].attn.num_heads == 4
    assert "assumed" not in str(report)
    narrow = backbones.create("vit_tiny_p16", depth=1, embed_dim=96, num_heads=3).state_dict()
    with pytest.raises(ValueError, match=r"b\.pth.*width 96, no multiple of 64; give num_heads"):
        backbones.load(saved(tmp_path / "b.pth", narrow))


def test_hugging_faces_epsilon_is_told_and_explains_the_difference(tmp_path):
    theirs = huggingface("ViT", layer_norm_eps=1e-12)
    theirs.save_pretrained(tmp_path)
    backbone, report = backbones.load(tmp_path)
    assert "run with epsilon 1e-06, in transformers with 1e-12" in str(report)
    assert 1e-8 < differences(backbone, huggingface_tokens(theirs, images())) < 1e-4
    for norm in backbone.modules():
        if isinstance(norm, torch.nn.LayerNorm):
            norm.eps = 1e-12
    assert differences(backbone, huggingface_tokens(theirs, images())) < 1e-9


def test_another_activation_is_refused(tmp_path):
    huggingface("ViT", hidden_act="relu").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="hidden_act='relu'"):
        backbones.load(tmp_path)


def same(backbone, other):
    features, expected = backbone.double()(images()), other.double()(images())
    return largest(features.cls - expected.cls) == 0 and largest(features.patches - expected.patches) == 0


@pytest.mark.parametrize("network", ["teacher", "student"])
def test_dino_full_checkpoint(network, tmp_path):
    """As main_dino.py saves it: DDP around the student, heads, the arguments' Namespace, the optimizer."""
    networks = {"student": ours(), "teacher": stirred(ours(), seed=5)}
    head = {"head.mlp.0.weight": torch.zeros(4, 128), "head.last_layer.weight_g": torch.ones(4, 1)}
    content = {
        name: {f"{prefix}backbone.{key}": value for key, value in networks[name].state_dict().items()}
        | {prefix + key: value for key, value in head.items()}
        for name, prefix in (("student", "module."), ("teacher", ""))
    }
    content |= {"optimizer": {"state": {}}, "epoch": 100, "args": argparse.Namespace(arch="vit_small")}
    content["dino_loss"] = {"center": torch.zeros(1, 4)}
    backbone, report = backbones.load(saved(tmp_path / "checkpoint.pth", content), network=network)
    assert (report.layout, report.network) == ("DINO", network)
    assert report.unexpected == tuple(head)
    assert network in str(report)
    assert (backbone.offset, backbone.antialias, backbone.training) == (0.1, False, False)
    assert same(backbone, networks[network])


def test_dino_reads_its_table_as_it_was_trained(tmp_path):
    """DINO's own way to another size: a scale factor of (side + 0.1) / 14."""
    network = ours()
    backbone, _ = backbones.load(saved(tmp_path / "a.pth", network.state_dict()))
    table = network.pos_embed[:, 1:].double()
    for side in (6, 20):
        image = table.unflatten(1, (14, 14)).permute(0, 3, 1, 2)
        scale = (side + 0.1) / 14
        image = torch.nn.functional.interpolate(image, scale_factor=(scale, scale), mode="bicubic")
        other = ours(position_size=16 * side)
        positions = torch.cat([network.pos_embed[:, :1].double(), image.flatten(2).mT], dim=1)
        other.load_state_dict(network.state_dict() | {"pos_embed": positions.float()})
        features = backbone.double()(images(16 * side))
        assert largest(features.patches - other.double()(images(16 * side)).patches) < 1e-5


def test_ibot(tmp_path):
    network = ours(mask_token=True)
    state = dict(network.state_dict())
    state["masked_embed"] = state.pop("mask_token")[0]
    path = saved(
        tmp_path / "ibot.pth", {"state_dict": {f"module.backbone.{key}": x for key, x in state.items()}}
    )
    backbone, report = backbones.load(path)
    assert (report.layout, backbone.offset) == ("iBOT", 0.1)
    assert torch.equal(backbone.mask_token, network.mask_token)
    assert same(backbone, network)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("registers", [0, 4])
@pytest.mark.parametrize("ffn", ["mlp", "swiglu"])
def test_dinov2(ffn, registers, chunked, tmp_path):
    options = {"ffn": ffn, "registers": registers, "mask_token": True, "layer_scale": 1e-5, "patch": 14}
    network = ours(**options, position_size=518)
    state = dict(network.state_dict())
    state["mask_token"] = state["mask_token"][0]
    if chunked:  # blocks.1.1 is the second block, in the second chunk
        state = {
            key.replace("blocks.0.", "blocks.0.0.").replace("blocks.1.", "blocks.1.1."): x
            for key, x in state.items()
        }
    backbone, report = backbones.load(saved(tmp_path / "dinov2.pth", state))
    trained = (0.0, True) if registers else (0.1, False)
    assert (backbone.offset, backbone.antialias) == trained
    assert report.layout == ("DINOv2 with registers" if registers else "DINOv2")
    assert backbone.pos_embed.shape[1] == 1 + 37 * 37
    network.offset, network.antialias = trained
    assert same(backbone, network)


def test_dinov2s_training_checkpoint(tmp_path):
    network = ours(mask_token=True, layer_scale=1e-5)
    state = {f"backbone.{key}": value for key, value in network.state_dict().items()}
    state |= {"dino_head.last_layer.weight": torch.zeros(1), "ibot_head.mlp.0.weight": torch.zeros(1)}
    _, report = backbones.load(saved(tmp_path / "teacher_checkpoint.pth", {"teacher": state}))
    assert (report.layout, report.network) == ("DINOv2", "teacher")
    assert report.unexpected == ("dino_head.last_layer.weight", "ibot_head.mlp.0.weight")


def test_a_vit_without_a_table_wants_to_be_told_its_positions(tmp_path):
    network = ours(position="sincos2d")
    path = saved(tmp_path / "a.pth", network.state_dict())
    with pytest.raises(ValueError, match=r'a\.pth.*position="none"'):
        backbones.load(path)
    backbone, report = backbones.load(path, position="sincos2d")
    assert same(backbone, network)
    assert (backbone.offset, "interpolated" in str(report)) == (0.0, False)
