"""A user's own network by dotted path: what is accepted, and what a user reads where it isn't."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from nestling import backbones
from nestling.backbones.features import Backbone, Features

HERE = __name__


class Map(nn.Module):
    def __init__(self, in_chans=3, width=8, drop_path=0.0):
        super().__init__()
        self.conv = nn.Conv2d(in_chans, width, 16, 16)
        self.drop_path = drop_path

    def forward(self, images):
        return self.conv(images)


class Vector(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 6)

    def no_weight_decay(self):
        return {"linear.weight"}

    def forward(self, images):
        return self.linear(images.mean((2, 3)))


class Tokens(Map):
    def forward(self, images):
        x = self.conv(images)
        return Features(x.amax((2, 3)), x.flatten(2).mT, tuple(x.shape[2:]))


class Returns(Map):
    """Breaks the contract, one way after the other."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, images):
        x = self.conv(images)
        tokens = x.flatten(2).mT
        grid = tuple(x.shape[2:])
        return {
            "tokens": tokens,
            "pair": (x, x),
            "mapping": {"x": x},
            "nothing": None,
            "grid": Features(tokens[:, 0], tokens, (1, 1)),
            "width": Features(tokens[:, 0, :4], tokens, grid),
            "one": x.mean((0, 2, 3))[None],
        }[self.what]


class Failing(Map):
    def forward(self, images):
        raise KeyError("inside")


class Uncopyable(Map):
    def __deepcopy__(self, memo):
        raise RuntimeError("no copies")


class Computing(Map):
    """Its forward reads a number, which no meta tensor has."""

    def forward(self, images):
        return self.conv(images) * (1.0 if images.sum().item() == 0 else 2.0)


class Own(Backbone):
    """A backbone as our own families are."""

    def __init__(self, name, width=8, claimed=8):
        super().__init__()
        self.name, self.embed_dim, self.stride, self.min_size = name, claimed, 16, 16
        self.net = Tokens(width=width)

    def forward(self, images, mask=None):
        return self.net(images)

    def pyramid(self, images):
        return [images]

    def attention(self, images):
        return images


def factory(width=4):
    return Map(width=width)


def open_factory(**options):
    return Map(**options)


def not_a_module():
    return "a string"


def raising():
    raise RuntimeError("no licence")


an_instance = Map()


@pytest.mark.parametrize(
    ("name", "options", "width", "stride", "least"),
    [
        (f"{HERE}.Map", {}, 8, 16, 16),
        (f"{HERE}:Map", {"width": 5, "drop_path": 0.2}, 5, 16, 16),
        (f"{HERE}:factory", {"width": 6, "drop_path": 0.0, "in_chans": 3}, 6, 16, 16),
        (f"{HERE}:open_factory", {"width": 6, "drop_path": 0.1, "in_chans": 4}, 6, 16, 16),
        (f"{HERE}.Tokens", {}, 8, 16, 16),
        (f"{HERE}.Computing", {}, 8, 16, 16),
        (f"{HERE}.Vector", {}, 6, 256, 1),
    ],
)
def test_a_network_is_measured_and_gives_features(name, options, width, stride, least):
    model = backbones.create(name, **options)
    assert (model.name, model.embed_dim, model.stride, model.min_size) == (name, width, stride, least)
    images = torch.randn(2, options.get("in_chans", 3), 32, 48)
    features = model(images)
    rows, columns = features.grid
    assert (rows, columns) == ((1, 1) if stride == 256 else (2, 3))
    assert features.cls.shape == (2, width)
    assert features.patches.shape == (2, rows * columns, width)
    assert [level.shape[2:] for level in model.pyramid(images)] == [(8, 12), (4, 6), (2, 3), (1, 2)]


@torch.no_grad()
def test_of_a_map_the_image_vector_is_the_mean_patch_and_patches_lie_row_major():
    model, images = backbones.create(f"{HERE}.Map"), torch.randn(2, 3, 32, 48)
    features, x = model(images), model.model(images)
    torch.testing.assert_close(features.cls, x.mean((2, 3)))
    torch.testing.assert_close(features.patches[:, 4], x[:, :, 1, 1])


@torch.no_grad()
def test_features_and_vectors_come_through_unchanged():
    images = torch.randn(2, 3, 32, 48)
    model = backbones.create(f"{HERE}.Tokens")
    assert all(map(torch.equal, model(images)[:2], model.model(images)[:2]))
    model = backbones.create(f"{HERE}.Vector")
    features = model(images)
    assert torch.equal(features.cls, model.model(images))
    assert torch.equal(features.patches[:, 0], features.cls)
    assert model.no_weight_decay() == {"model.linear.weight"}


def test_options_reach_the_constructor():
    model = backbones.create(f"{HERE}:Map", width=5, drop_path=0.2, in_chans=4)
    assert model.model.drop_path == 0.2
    assert model.model.conv.weight.shape == (5, 4, 16, 16)


def test_a_backbone_of_ones_own_is_used_as_it_is():
    model = backbones.create(f"{HERE}.Own", drop_path=0.0)
    assert type(model) is Own
    assert model.name == f"{HERE}.Own"
    with pytest.raises(ValueError, match="returns 8 features, where its embed_dim is 9"):
        backbones.create(f"{HERE}.Own", claimed=9)


@torch.no_grad()
def test_a_custom_network_is_copied_pickled_and_restored():
    model, images = backbones.create(f"{HERE}.Tokens"), torch.randn(2, 3, 32, 48)
    other = backbones.create(f"{HERE}.Tokens")
    assert not torch.equal(other(images).cls, model(images).cls)
    other.load_state_dict(model.state_dict(), strict=True)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), other):
        assert twin.name == model.name
        assert torch.equal(twin(images).cls, model(images).cls)
    assert not model.eval().model.training
    assert model.train().model.training


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "nowhere_at_all.Net",
            {},
            r"no module nowhere_at_all found, neither installed nor in the working dir",
        ),
        ("timmm:vit", {}, r"other forms are timm:NAME, torchvision:NAME and my.module:ClassName"),
        (f"{HERE}.Missing", {}, f"{HERE} has no Missing"),
        (f"{HERE}:", {}, "is no path to a class; write my.module:ClassName"),
        (f"{HERE}.HERE", {}, "is an object of type str, not a class or function"),
        (f"{HERE}.an_instance", {}, "is an object of type Map, not a class or function"),
        (f"{HERE}.Map", {"widht": 3}, r"Map\(in_chans=3, width=8, drop_path=0.0\) .* argument 'widht'"),
        (f"{HERE}.Returns", {}, "missing a required argument: 'what'"),
        (f"{HERE}.Vector", {"drop_path": 0.1}, "Vector has no option 'drop_path', so it must be 0, not 0.1"),
        (f"{HERE}.Vector", {"in_chans": 4}, "Vector has no option 'in_chans', so it must be 3, not 4"),
        (f"{HERE}.Map", {"drop_path": 1.0}, "drop_path"),
        (f"{HERE}.not_a_module", {}, "gives an object of type str, not an nn.Module"),
        (f"{HERE}.raising", {}, "can't be built: RuntimeError: no licence"),
        (f"{HERE}.Failing", {}, "fails on 224 x 224 images of 3 channels: KeyError: 'inside'"),
        (f"{HERE}.Uncopyable", {}, "can't be copied, as a teacher must be: RuntimeError: no copies"),
        (f"{HERE}.Returns", {"what": "tokens"}, r"returns a tensor of shape \(2, 196, 8\) for images"),
        (
            f"{HERE}.Returns",
            {"what": "pair"},
            r"returns a tuple of a tensor of shape .* and a tensor of shape",
        ),
        (f"{HERE}.Returns", {"what": "mapping"}, "returns an object of type dict"),
        (f"{HERE}.Returns", {"what": "nothing"}, "returns an object of type NoneType"),
        (f"{HERE}.Returns", {"what": "grid"}, r"patches of shape \(2, 196, 8\) with grid \(1, 1\)"),
        (f"{HERE}.Returns", {"what": "width"}, r"cls of shape \(2, 4\) and patches of shape \(2, 196, 8\)"),
        (f"{HERE}.Returns", {"what": "one"}, r"cls of shape \(1, 8\)"),
    ],
)
def test_what_makes_no_backbone_is_refused_in_a_sentence(name, options, message):
    with pytest.raises(ValueError, match=message):
        backbones.create(name, **options)


def test_a_module_that_fails_to_import_says_why(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lacks_something.py").write_text("import a_library_that_is_not_there\n")
    (tmp_path / "has_a_typo.py").write_text("x = = 1\n")
    with pytest.raises(ValueError, match=r"importing lacks_something fails: No module named 'a_library_that"):
        backbones.create("lacks_something.Net")
    with pytest.raises(ValueError, match=r"importing has_a_typo fails: SyntaxError"):
        backbones.create("has_a_typo.Net")


def run_in(folder: Path, code: str) -> str:
    """A fresh Python whose path holds another folder, as that of a recipe that accelerate starts."""
    script = folder / "elsewhere" / "recipe.py"
    script.parent.mkdir()
    script.write_text(code)
    command = [sys.executable, str(script)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.slow
def test_the_working_directory_is_looked_in_last_and_only_for_what_is_not_found_elsewhere(tmp_path):
    network = (
        "from torch import nn\n"
        "class Net(nn.Conv2d):\n"
        "    def __init__(self):\n"
        "        super().__init__(3, 4, 8, 8)\n"
    )
    (tmp_path / "my_own_net.py").write_text(network)
    (tmp_path / "timm.py").write_text("raise SystemExit('hides the installed timm')\n")
    code = (
        "import os, sys\n"
        "from nestling import backbones\n"
        "before = list(sys.path)\n"
        "try:\n"
        "    backbones.create('not_here_either.Net')\n"
        "except ValueError as error:\n"
        "    print(os.getcwd() in str(error), sys.path == before)\n"
        "backbones.create('torchvision.models.resnet18', num_classes=7)\n"
        "print(sys.path == before)\n"
        "print(backbones.create('my_own_net:Net').embed_dim, sys.path == [*before, os.getcwd()])\n"
        "print(backbones.create('timm:resnet10t').embed_dim)\n"
    )
    assert run_in(tmp_path, code).splitlines() == ["True True", "True", "4 True", "512"]
