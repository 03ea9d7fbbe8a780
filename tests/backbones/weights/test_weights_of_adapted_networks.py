"""Runs and exports of timm's, torchvision's and a user's networks: their keys come back as they are."""

import json
import sys

import pytest
import torch
from foreign_networks import images, largest, stirred
from safetensors.torch import save_file

from nestling import backbones
from nestling.backbones.weights import read

MODULES = """
import torch
from torch import nn
from nestling.backbones import Backbone, Features


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.ModuleDict({"backbone": nn.Conv2d(3, 16, 8, 8), "head": nn.Conv2d(16, 8, 1)})

    def forward(self, x):
        return self.model["head"](self.model["backbone"](x))


class Whole(Backbone):
    embed_dim, stride, min_size = 16, 8, 8

    def __init__(self, name="whole"):
        super().__init__()
        self.name = name
        self.backbone, self.head = nn.Conv2d(3, 16, 8, 8), nn.Linear(16, 16)
        self.net, self.encoder, self.teacher = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, images, mask=None):
        x = self.backbone(images)
        grid = x.shape[-2:]
        x = self.teacher(self.encoder(self.net(self.head(x.flatten(2).mT))))
        return Features(x.mean(1), x, tuple(grid))

    def pyramid(self, images):
        x = self(images).patches.mT.unflatten(2, (images.shape[2] // 8, images.shape[3] // 8))
        sizes = [(-(-images.shape[2] // s), -(-images.shape[3] // s)) for s in (4, 8, 16, 32)]
        return [nn.functional.interpolate(x, size) for size in sizes]

    def attention(self, images):
        raise ValueError("none")
"""


def described(name, **options):
    return {"nestling": json.dumps({"backbone": {"name": name, "options": options}})}


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Two networks of a user's, whose parts bear the names of wrappers."""
    (tmp_path / "users_networks.py").write_text(MODULES)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("users_networks", None)


ADAPTED = ["timm:resnet10t", "torchvision:resnet18", "users_networks:Net", "users_networks.Whole"]


@pytest.mark.parametrize("name", ADAPTED)
@pytest.mark.parametrize("kind", ["checkpoint", "export"])
def test_an_adapted_network_comes_back_whatever_its_parts_are_called(name, kind, modules, tmp_path):
    library = name.partition(":")[0]
    asked = None if library in ("timm", "torchvision") else name  # a user's code runs if the user names it
    if asked is None:
        pytest.importorskip(library)
    network = stirred(backbones.create(name))
    tensors, facts = dict(network.state_dict()), {"backbone": {"name": name, "options": {}}}
    if kind == "checkpoint":
        tensors = {f"backbone.{key}": value for key, value in tensors.items()}
        tensors |= {"head.mlp.0.weight": torch.zeros(2), "head.backbone.weight": torch.zeros(2)}
    else:
        facts |= {"network": None, "step": 3}
    file = tmp_path / "teacher.safetensors"
    tensors = {key: value.contiguous() for key, value in tensors.items()}
    save_file(tensors, file, {"nestling": json.dumps(facts)})
    backbone, report = backbones.load(file, asked)
    assert (backbone.name, report.layout, report.network) == (name, "nestling", "teacher")
    heads = ("head.backbone.weight", "head.mlp.0.weight") if kind == "checkpoint" else ()
    assert tuple(sorted(report.unexpected)) == heads
    assert report.matched == tuple(network.state_dict())
    with torch.no_grad():
        features, expected = backbone(images(64).float()), network(images(64).float())
    assert largest(features.cls - expected.cls) == 0


def test_an_export_whose_parts_are_a_checkpoints_is_read_as_it_is(modules, tmp_path):
    tensors = {"backbone.weight": torch.zeros(2), "head.weight": torch.zeros(2)}
    facts = {"backbone": {"name": "timm:resnet10t", "options": {}}, "network": "teacher"}
    save_file(tensors, tmp_path / "model.safetensors", {"nestling": json.dumps(facts)})
    weights = read(tmp_path)
    assert (weights.tensors.keys(), weights.left_out) == (tensors.keys(), ())


@pytest.mark.parametrize("name", ["users_networks:Net", "users_networks.Net"])
def test_code_of_the_users_is_named_by_the_user_too(name, modules, tmp_path):
    network = backbones.create(name)
    save_file(network.state_dict(), tmp_path / "model.safetensors", described(name))
    weights = read(tmp_path, name=name)
    assert (weights.name, weights.tensors.keys()) == (name, network.state_dict().keys())
    with pytest.raises(ValueError, match=rf"code outside nestling; say name='{name}'"):
        read(tmp_path)


def test_a_files_metadata_can_not_choose_other_files(tmp_path):
    pytest.importorskip("timm")
    weights = backbones.create("timm:resnet10t").state_dict()
    for option in ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir", "pretrained"):
        save_file(weights, tmp_path / "a.safetensors", described("timm:resnet10t", **{option: "elsewhere"}))
        with pytest.raises(ValueError, match=f"{option} of timm:resnet10t can't be set"):
            backbones.load(tmp_path / "a.safetensors")
