"""Every layout of an XCiT: saved as users have it, loaded, and compared in float64 with its own library."""

import argparse
import json

import pytest
import torch
from foreign_networks import images, largest, stirred
from safetensors.torch import save_file

from nestling import backbones
from nestling.backbones.weights.timm import to_timm


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def ours(name="xcit_tiny_12_p16", **options):
    torch.manual_seed(0)
    return stirred(backbones.create(name, **{"depth": 2, **options}))


def saved(path, content):
    torch.save(content, path)
    return path


def same(backbone, other, size=(96, 80), channels=3):
    features, expected = (each.double()(images(*size, channels)) for each in (backbone, other))
    return largest(features.cls - expected.cls) == 0 and largest(features.patches - expected.patches) == 0


@pytest.mark.parametrize("form", ["pth", "safetensors"])
@pytest.mark.parametrize("name", ["xcit_nano_12_p16", "xcit_tiny_12_p8", "xcit_small_24_p16"])
def test_timm(name, form, tmp_path):
    timm = pytest.importorskip("timm")
    theirs = stirred(timm.create_model(f"{name}_224", depth=2, num_classes=3))
    path = tmp_path / f"xcit.{form}"
    save_file(theirs.state_dict(), path) if form == "safetensors" else saved(path, theirs.state_dict())
    backbone, report = backbones.load(path)
    features, tokens = backbone.double()(images(96, 80)), theirs.double().forward_features(images(96, 80))
    assert largest(features.cls - tokens[:, 0]) < 1e-9
    assert largest(features.patches - tokens[:, 1:]) < 1e-9
    assert report.layout == "timm XCiT"
    assert set(report.unexpected) == {"head.weight", "head.bias"}


@pytest.mark.parametrize("name", ["xcit_nano_12_p8", "xcit_tiny_12_p16"])
def test_the_published_supervised_files(name, tmp_path):
    """The reader of published files that timm has is the judge of what they hold."""
    reader = pytest.importorskip("timm.models.xcit").checkpoint_filter_fn
    timm = pytest.importorskip("timm")
    network = ours(name)
    state = dict(network.state_dict())
    theirs = timm.create_model(f"{name}_224", depth=2, num_classes=0).eval()
    theirs.load_state_dict(reader({"model": dict(state)}, theirs), strict=True)
    head = {"head.weight": torch.zeros(3, network.embed_dim), "head.bias": torch.zeros(3)}
    path = saved(tmp_path / "xcit.pth", {"model": state | head})
    backbone, report = backbones.load(path)
    assert (
        largest(backbone.double()(images(96)).cls - theirs.double().forward_features(images(96))[:, 0]) < 1e-9
    )
    assert report.layout == "XCiT"
    assert report.unexpected == tuple(head)


@pytest.mark.parametrize("network", ["teacher", "student"])
def test_dinos_checkpoint_with_running_statistics(network, tmp_path):
    networks = {"student": ours(), "teacher": stirred(ours(), seed=5)}
    content = {
        name: {f"module.backbone.{key}": value for key, value in each.state_dict().items()}
        | {"module.head.mlp.0.weight": torch.zeros(1)}
        for name, each in networks.items()
    }
    content["args"] = argparse.Namespace(arch="xcit_small_12_p16")
    backbone, report = backbones.load(saved(tmp_path / "checkpoint.pth", content), network=network)
    assert (report.layout, report.network, report.unexpected) == ("XCiT", network, ("head.mlp.0.weight",))
    assert same(backbone, networks[network])
    statistics = dict(backbone.float().named_buffers())
    for key, value in networks[network].float().named_buffers():
        assert torch.equal(value, statistics[key]), key


@pytest.mark.parametrize(
    "options",
    [
        {"in_chans": 5},
        {"stem": "linear"},
        {"mask_token": True},
        {"pyramid": True},
        {"mlp_ratio": 2.5, "cls_depth": 3},
        {"embed_dim": 64, "num_heads": 2, "patch": 4},
    ],
)
def test_options_are_read_from_the_tensors(options, tmp_path):
    network = ours(**options)
    backbone, report = backbones.load(saved(tmp_path / "xcit.pth", network.state_dict()))
    assert report.missing == report.unexpected == ()
    assert same(backbone, network, channels=options.get("in_chans", 3))
    assert len(network.state_dict()) == len(report.matched)


@pytest.mark.parametrize(("width", "tokens_norm"), [(64, False), (64, True), (128, True), (128, False)])
def test_timms_config_gives_tokens_norm(width, tokens_norm, tmp_path):
    network = ours("xcit_nano_12_p16", embed_dim=width, num_heads=4, tokens_norm=tokens_norm)
    model = to_timm(network)
    config = {"architecture": model.name, "num_features": width, "model_args": model.arguments}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {key: value.contiguous() for key, value in model.tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    backbone, _ = backbones.load(tmp_path)
    assert backbone.cls_attn_blocks[0].tokens_norm is tokens_norm
    assert same(backbone, network)


def test_the_nano_alone_was_trained_without_tokens_norm(tmp_path):
    for name, expected in (("xcit_nano_12_p16", False), ("xcit_tiny_12_p16", True)):
        path = saved(tmp_path / "xcit.pth", ours(name).state_dict())
        backbone, _ = backbones.load(path)
        assert backbone.cls_attn_blocks[0].tokens_norm is expected
        backbone, _ = backbones.load(path, tokens_norm=not expected)
        assert backbone.cls_attn_blocks[0].tokens_norm is not expected
