"""transformers loads the folder without a missing or unexpected key and gives equal features."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from export_subjects import MEAN, STD, small

from nestling.ssl.errors import UserError
from nestling.ssl.export.exporting import export
from nestling.ssl.export.huggingface import HuggingFace, as_network, quietly_loaded
from nestling.ssl.views.evaluation import eval_view

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}  # where export_subjects lies
VARIANTS = [
    ("vit", {}, "vit"),
    ("vit", {"layer_scale": 0.1}, "dinov2"),
    ("vit", {"registers": 2, "layer_scale": 0.1}, "dinov2_with_registers"),
    ("vit", {"registers": 2, "interpolate_antialias": True}, "dinov2_with_registers"),
    ("swin", {}, "swin"),
]


@pytest.mark.parametrize(("family", "options", "kind"), VARIANTS)
def test_transformers_agrees_in_float64_with_no_key_left_over(tmp_path, family, options, kind):
    subject = small(family, **options)
    record = export(subject, HuggingFace(), tmp_path / "out")
    assert record["largest_difference"] < 1e-4
    assert record["model_type"] == kind
    model, report = quietly_loaded(tmp_path / "out")
    assert {name: list(keys) for name, keys in report.items() if keys} == {}
    network = as_network(model.double())
    subject.backbone.double()
    for number, size in enumerate(HuggingFace().sizes(subject)):
        images = torch.randn(2, 3, *size, dtype=torch.float64)
        atol = 1e-7 if number and family == "vit" else 1e-9  # they resize the table in fp32
        with torch.no_grad():
            ours, (cls, patches) = subject.backbone(images), network(images)
        torch.testing.assert_close(cls, ours.cls, rtol=0, atol=atol)
        torch.testing.assert_close(patches, ours.patches, rtol=0, atol=atol)


def test_other_sizes_are_compared_where_transformers_resizes_as_the_backbone_does():
    table, both = [(64, 64)], [(64, 64), (80, 96)]
    sizes = HuggingFace().sizes
    assert sizes(small("vit")) == sizes(small("vit", registers=1, interpolate_antialias=True)) == both
    assert sizes(small("vit", interpolate_antialias=True)) == sizes(small("vit", registers=1)) == table
    assert sizes(small("vit", interpolate_offset=0.1)) == table


def test_a_vit_agrees_at_other_sizes_where_asked_to_interpolate(tmp_path):
    subject = small("vit")
    HuggingFace().write(subject, tmp_path)
    model, _ = quietly_loaded(tmp_path)
    images = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        theirs = model(pixel_values=images, interpolate_pos_encoding=True)
        ours = subject.backbone(images)
    torch.testing.assert_close(theirs.last_hidden_state[:, 1:], ours.patches, rtol=0, atol=1e-4)
    torch.testing.assert_close(theirs.pooler_output, ours.cls, rtol=0, atol=1e-4)


def test_transformers_prepares_images_as_the_evaluation_does(tmp_path):
    HuggingFace().write(small("vit"), tmp_path)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    image = np.random.default_rng(0).integers(0, 256, (100, 140, 3), dtype=np.uint8)
    theirs = processor(image, return_tensors="np")["pixel_values"][0]
    pixels = eval_view(image, 64).astype(np.float64) / 255
    ours = (pixels - np.array(MEAN)[:, None, None]) / np.array(STD)[:, None, None]
    assert theirs.shape == ours.shape
    # Resizing differs by rounding and where the square begins, by less than a pixel.
    assert np.corrcoef(theirs.ravel(), ours.ravel())[0, 1] > 0.9
    assert abs(theirs.mean() - ours.mean()) < 0.05


def test_xcit_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(UserError, match=r"--to hf: xcit_nano_12_p16 is an XCiT"):
        export(small("xcit"), HuggingFace(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_transformers_is_not_needed_to_write(tmp_path):
    program = f"""
import sys
sys.modules["transformers"] = None
from export_subjects import small
from nestling.ssl.export.huggingface import HuggingFace
from pathlib import Path
HuggingFace().write(small("vit"), Path({str(tmp_path)!r}))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, env=ENVIRONMENT)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "vit"
