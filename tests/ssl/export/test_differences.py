"""The docs' table of differences is complete, and made by a script."""

import re

import pytest
from export_subjects import small

from nestling import backbones
from nestling.ssl.errors import UserError
from nestling.ssl.export import differences
from nestling.ssl.export.exporting import TARGETS
from nestling.ssl.export.huggingface import HuggingFace
from nestling.ssl.export.own import Own
from nestling.ssl.export.timm import Timm


def documented(repository):
    page = (repository / "docs/export.md").read_text()
    part = re.search(r"<!-- differences: begin.*?<!-- differences: end -->", page, re.DOTALL)
    lines = [line.strip("| ").split(" | ") for line in part[0].splitlines() if line.startswith("|")]
    return lines[0], lines[2:]


def test_the_table_names_every_family_size_and_target(repository):
    head, lines = documented(repository)
    assert head == ["family", "pixels", *TARGETS]
    sizes = [f"{height} x {width}" for height, width in differences.SIZES]
    assert [line[:2] for line in lines] == [
        [family, size] for family in differences.FAMILIES for size in sizes
    ]
    built_in = {name.partition("_")[0] for name in backbones.names() if ":" not in name}
    assert set(differences.FAMILIES) == built_in


def test_the_documented_differences_are_within_the_tolerance_at_224(repository):
    head, lines = documented(repository)
    for family, pixels, *cells in lines:
        for name, cell in zip(head[2:], cells, strict=True):
            if pixels == "224 x 224" and (family, name) != ("xcit", "hf"):
                assert float(cell) <= TARGETS[name].tolerance, (family, name)


@pytest.mark.slow
def test_timms_differences_of_a_vit_are_as_documented(repository):
    head, lines = documented(repository)
    row = {pixels: cells for family, pixels, *cells in lines if family == "vit"}
    said = [float(row[size][head[2:].index("timm")]) for size in ("96 x 96", "224 x 224")]
    sizes = differences.SIZES[:2]
    assert sizes == [(96, 96), (224, 224)]
    example = differences.example(differences.FAMILIES["vit"])
    resized, same = map(float, differences.column(example, Timm(), sizes))
    assert said[0] / 1.5 < resized < said[0] * 1.5
    assert same <= 10 * max(said[1], 1e-6)  # rounding, which depends on the processor


def test_a_column_holds_what_was_found():
    sizes = [(64, 64), (32, 32)]
    assert differences.column(small("vit"), Own(), sizes) == ["0", "0"]
    same, other = differences.column(small("vit"), Timm(), sizes)
    assert float(same) < 1e-4 < 1e-3 < float(other)  # timm antialiases where the table shrinks
    assert differences.column(small("xcit"), HuggingFace(), sizes) == ["refused", "refused"]


def test_a_table_needs_every_loader():
    class Foreign(Own):
        loader = "no_such_package"

    with pytest.raises(UserError, match="the table needs no_such_package"):
        differences.column(small("vit"), Foreign())


def test_the_table_is_markdown():
    width = len(TARGETS)
    lines = differences.table([["vit", "224 x 224", *["0"] * width]]).splitlines()
    assert [line.count("|") for line in lines] == [width + 3] * 3
    assert lines[2].startswith("| vit | 224 x 224 | 0 |")
