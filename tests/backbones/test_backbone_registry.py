"""Backbones by name, and what a user reads after a slip."""

import pytest
import torch

from nestling import backbones
from nestling.backbones import registry


def test_names_are_sorted_and_hold_every_xcit():
    names = backbones.names()
    assert names == sorted(set(names))
    sizes = ["nano_12", "tiny_12", "tiny_24", "small_12", "small_24", "medium_24", "large_24"]
    assert {f"xcit_{size}_p{patch}" for size in sizes for patch in (16, 8, 4)} <= set(names)


@pytest.mark.parametrize(("name", "millions"), [("xcit_small_12_p16", 25.87), ("xcit_medium_24_p16", 83.88)])
def test_headless_sizes_are_the_published_ones(name, millions):
    with torch.device("meta"):
        model = backbones.create(name)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.005)


def test_an_unknown_name_fails_with_the_closest():
    with pytest.raises(
        ValueError, match=r"unknown backbone 'xcit_smal_12_p16'; did you mean xcit_small_12_p16"
    ):
        backbones.create("xcit_smal_12_p16")
    with pytest.raises(ValueError, match=r"known are .*xcit_large_24_p16"):
        backbones.create("qqq")
    with pytest.raises(ValueError, match=r"other forms are timm:NAME, torchvision:NAME and my.module:Class"):
        backbones.create("qqq")


def test_a_name_is_checked_without_building_or_importing_anything():
    for name in ("vit_small_p16", "timm:whatever", "torchvision:whatever", "my.module.Net", "my:Net"):
        registry.check_name(name)
    with pytest.raises(ValueError, match="unknown backbone 'vit_smal_p16'; did you mean vit_small_p16"):
        registry.check_name("vit_smal_p16")


def test_an_unknown_option_fails_with_the_closest():
    with pytest.raises(ValueError, match=r"no option 'drop_pth'; did you mean drop_path"):
        backbones.create("xcit_nano_12_p16", drop_pth=0.1)
    with pytest.raises(ValueError, match=r"no option 'zz'; known are .*embed_dim"):
        backbones.create("xcit_nano_12_p16", zz=1)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("depth", "four", "depth of xcit_nano_12_p16 takes a value of type int, not 'four'"),
        ("depth", 4.5, "type int, not 4.5"),
        ("depth", True, "type int, not True"),
        ("mask_token", 1, "type bool, not 1"),
        ("drop_path", None, "type float, not None"),
        ("depth", 0, "depth of xcit_nano_12_p16 must be above 0"),
        ("cls_depth", 0, "cls_depth"),
        ("in_chans", -1, "in_chans"),
        ("num_heads", 0, "num_heads"),
        ("num_heads", 3, "embed_dim=128 .* num_heads=3"),
        ("mlp_ratio", 0, "mlp_ratio"),
        ("mlp_ratio", 0.001, "mlp_ratio"),
        ("layer_scale", -1.0, "layer_scale"),
        ("layer_scale", float("nan"), "layer_scale"),
        ("drop_path", 1.0, "drop_path"),
        ("drop_path", -0.1, "drop_path"),
        ("drop_path", float("nan"), "drop_path"),
        ("stem", "convv", "stem of xcit_nano_12_p16 must be conv or linear, not 'convv'"),
        ("patch", 14, "patch of xcit_nano_12_p16 must be 4, 8 or 16, not 14"),
        ("embed_dim", 132, "embed_dim=132 .* multiple of 8"),
    ],
)
def test_a_value_that_makes_no_network_is_refused_by_option(option, value, message):
    with pytest.raises(ValueError, match=message):
        backbones.create("xcit_nano_12_p16", **{option: value})


def test_options_override_the_defaults_of_a_name_and_an_integer_passes_for_a_float():
    model = backbones.create("xcit_nano_12_p16", embed_dim=64, depth=2, mlp_ratio=2, drop_path=0)
    assert model.embed_dim == 64
    assert len(model.blocks) == 2
    assert model.blocks[0].mlp.fc1.out_features == 128


def test_a_name_cannot_be_registered_twice():
    with pytest.raises(AssertionError, match="xcit_nano_12_p16"):
        registry.register({"xcit_nano_12_p16": {}})(backbones.Backbone)


def test_an_incomplete_family_cannot_be_built():
    class Incomplete(backbones.Backbone):
        def forward(self, images, mask=None):
            return images

    with pytest.raises(TypeError, match="abstract"):
        Incomplete()
