"""What no tensor shows: heads by the width or by config.json, which counts where it is the file's own."""

import json

import pytest
import torch
from foreign_networks import images, largest, stirred
from safetensors.torch import save_file

from nestling import backbones
from nestling.backbones.weights.identify import assumptions, identify
from nestling.backbones.weights.timm import to_timm

SMALL = {"depth": 2, "embed_dim": 128, "num_heads": 2}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def ours(**options):
    torch.manual_seed(0)
    return stirred(backbones.create("vit_tiny_p16", **{**SMALL, **options}))


def saved(path, content):
    torch.save(content, path)
    return path


def differences(backbone, tokens):
    features = backbone.double()(images(56))
    return max(largest(features.cls - tokens[:, 0]), largest(features.patches - tokens[:, 1:]))


def same(backbone, other):
    return largest(backbone.double()(images()).patches - other.double()(images()).patches) == 0


@pytest.mark.parametrize(
    ("width", "heads"),
    [(192, 3), (384, 6), (768, 12), (1024, 16), (1280, 16), (1408, 16), (1536, 24), (1664, 16)],
)
def test_heads_of_the_usual_widths_are_known(width, heads):
    with torch.device("meta"):
        tensors = backbones.create("vit_tiny_p16", depth=1, embed_dim=width, num_heads=1).state_dict()
    settled = identify("vit", tensors, {})
    assert settled["num_heads"] == heads
    assert assumptions("vit", settled, {}) == []


def test_torchvisions_huge_vit_has_16_heads(tmp_path):
    torchvision = pytest.importorskip("torchvision")
    theirs = stirred(torchvision.models.VisionTransformer(56, 14, 1, 16, 1280, 640))
    backbone, report = backbones.load(saved(tmp_path / "huge.pth", theirs.state_dict()))
    theirs = theirs.double()
    x = theirs._process_input(images(56))
    tokens = theirs.encoder(torch.cat([theirs.class_token.expand(len(x), -1, -1), x], dim=1))
    assert differences(backbone, tokens) < 1e-9
    assert "assumed" not in str(report)


@pytest.mark.parametrize("name", ["vit_huge_patch14_224", "vit_giant_patch14_224"])
def test_timms_huge_vits_have_16_heads(name, tmp_path):
    timm = pytest.importorskip("timm")
    theirs = stirred(timm.create_model(name, depth=1, img_size=56, mlp_ratio=0.5, num_classes=0))
    backbone, _ = backbones.load(saved(tmp_path / "huge.pth", theirs.state_dict()))
    assert differences(backbone, theirs.double().forward_features(images(56))) < 1e-9


def exported_to_timm(network, folder):
    model = to_timm(network)
    config = {"architecture": model.name, "num_features": network.embed_dim, "model_args": model.arguments}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({key: value.contiguous() for key, value in model.tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("options", [{"num_heads": 4}, {"num_heads": 8, "registers": 2, "layer_scale": 1e-5}])
def test_timms_config_gives_the_heads(options, tmp_path):
    network = ours(**options)
    exported_to_timm(network, tmp_path)
    backbone, report = backbones.load(tmp_path)
    assert backbone.blocks[0].attn.num_heads == options["num_heads"]
    assert same(backbone, network)
    assert "assumed" not in str(report)


UNRELATED = {
    "broken": "{not json",
    "a list": "[1, 2]",
    "a resnet of timm": '{"architecture": "resnet50", "num_features": 2048}',
    "a wider vit of timm": '{"architecture": "vit_base_patch16_224", "num_features": 768, '
    '"model_args": {"num_heads": 64}}',
    "a language model": '{"model_type": "bert", "hidden_size": 768, "hidden_act": "relu"}',
}


@pytest.mark.parametrize("case", UNRELATED)
def test_another_files_config_beside_dinos_changes_nothing(case, tmp_path):
    (tmp_path / "config.json").write_text(UNRELATED[case])
    network = ours()
    backbone, report = backbones.load(saved(tmp_path / "dino.pth", network.state_dict()))
    assert (report.layout, backbone.offset) == ("DINO", 0.1)
    assert same(backbone, network)
    assert ("config.json is no valid JSON" in str(report)) == (case == "broken")


def test_hugging_faces_config_is_used_where_it_is_the_files_own(tmp_path):
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
    theirs = transformers.ViTModel(transformers.ViTConfig(**shape))
    theirs.save_pretrained(tmp_path)
    backbone, report = backbones.load(tmp_path)
    assert (backbone.blocks[0].attn.num_heads, "assumed" in str(report)) == (4, False)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"hidden_size": 768, "hidden_act": "relu", "num_attention_heads": 1}))
    backbone, report = backbones.load(tmp_path)
    assert backbone.blocks[0].attn.num_heads == 2
    assert "assumed" in str(report)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is no valid JSON"):
        backbones.load(tmp_path)
