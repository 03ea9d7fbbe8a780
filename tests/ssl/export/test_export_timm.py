"""timm loads its folder and its state dict, strictly, and gives equal features."""

import json

import pytest
import timm
import torch
from export_subjects import MEAN, SMALL, STD, small
from safetensors.torch import load_file

from nestling.ssl.errors import UserError
from nestling.ssl.export.exporting import export
from nestling.ssl.export.timm import Timm, as_network

VARIANTS = [
    ("xcit", {}),
    ("vit", {}),
    ("vit", {"registers": 2, "layer_scale": 0.1, "ffn": "swiglu"}),
    ("vit", {"interpolate_antialias": True}),
    ("swin", {}),
]


@pytest.mark.parametrize(("family", "options"), VARIANTS)
def test_timm_agrees_in_float64_loaded_either_way(tmp_path, family, options):
    subject = small(family, **options)
    record = export(subject, Timm(), tmp_path / "out")
    assert record["largest_difference"] < 1e-4
    config = json.loads((tmp_path / "out/config.json").read_text())
    built = timm.create_model(config["architecture"], **config["model_args"]).eval()
    built.load_state_dict(load_file(tmp_path / "out/model.safetensors"), strict=True)
    created = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    assert created.num_classes == 0
    subject.backbone.double()
    for model in (built, created):
        network = as_network(model.double())
        for number, size in enumerate(Timm().sizes(subject)):
            images = torch.randn(2, 3, *size, dtype=torch.float64)
            atol = 1e-7 if number and family == "vit" else 1e-9  # they resize the table in fp32
            with torch.no_grad():
                ours, (cls, patches) = subject.backbone(images), network(images)
            torch.testing.assert_close(cls, ours.cls, rtol=0, atol=atol)
            torch.testing.assert_close(patches, ours.patches, rtol=0, atol=atol)


@pytest.mark.parametrize("family", ["xcit", "vit"])
def test_the_pooled_output_is_the_class_token(tmp_path, family):
    subject = small(family)
    export(subject, Timm(), tmp_path / "out")
    model = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(model(images), subject.backbone(images).cls, rtol=0, atol=1e-4)


def test_timm_prepares_images_as_the_run_did(tmp_path):
    Timm().write(small("vit"), tmp_path)
    model = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    prepared = timm.data.resolve_model_data_config(model)
    assert list(prepared["mean"]) == MEAN
    assert list(prepared["std"]) == STD
    assert tuple(prepared["input_size"]) == (3, 64, 64)
    assert (prepared["interpolation"], prepared["crop_pct"]) == ("bicubic", 0.875)


def test_what_timm_cannot_hold_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(UserError, match=r"--to timm: stem='linear' of xcit_nano_12_p16"):
        export(small("xcit", stem="linear"), Timm(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_every_family_is_tried_at_its_sizes():
    assert set(SMALL) == {family for family, _ in VARIANTS}
    assert Timm().sizes(small("vit")) == [(64, 64)]
    assert Timm().sizes(small("vit", interpolate_antialias=True)) == [(64, 64), (80, 96)]
    assert Timm().sizes(small("xcit")) == [(64, 64), (80, 104)]
    assert Timm().sizes(small("swin")) == [(224, 224)]
