"""An export is complete and compared, or absent."""

import json
from importlib.metadata import version

import pytest
import torch
from export_subjects import MEAN, SIDE, STD, small

from nestling.ssl.errors import UserError
from nestling.ssl.export.exporting import difference, export
from nestling.ssl.export.own import Own


class Wrong(Own):
    """Writes a network that is not the one it was given."""

    def write(self, subject, folder):
        facts = super().write(subject, folder)
        with torch.no_grad():
            next(subject.backbone.parameters()).add_(1.0)
        return facts


class Failing(Own):
    """Fails after it has begun to write."""

    def write(self, subject, folder):
        super().write(subject, folder)
        raise UserError("the layout has no such thing")


class Unreadable(Own):
    """Loaded by a package that nobody has."""

    loader = "no_such_package"


def everything(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_the_record_says_all_that_a_reader_has_to_know(tmp_path):
    subject = small("xcit")
    record = export(subject, Own(), tmp_path / "out")
    assert record == json.loads((tmp_path / "out/export.json").read_text())
    assert record["backbone"] == {"name": "xcit_nano_12_p16", "options": subject.options}
    assert (record["network"], record["step"], record["checkpoint"]) == ("teacher", 7, "RUN")
    assert (record["mean"], record["std"], record["side"]) == (MEAN, STD, SIDE)
    assert (record["target"], record["checked"], record["largest_difference"]) == (
        "nestling",
        "loaded back",
        0,
    )
    assert record["sizes"] == {"64x64": 0, "80x104": 0}
    assert record["versions"] == {name: version(name) for name in ("nestling", "torch")}
    assert everything(tmp_path) == ["out", "out/README.md", "out/export.json", "out/model.safetensors"]


def test_a_difference_is_an_error_and_leaves_nothing(tmp_path):
    with pytest.raises(UserError, match=r"xcit_nano_12_p16 exported to nestling differs by .* at 64 x 64"):
        export(small("xcit"), Wrong(), tmp_path / "deep/out")
    assert everything(tmp_path) == ["deep"]


def test_a_failure_leaves_nothing_and_an_earlier_export_as_it_was(tmp_path):
    out = tmp_path / "out"
    export(small("xcit"), Own(), out)
    before = {path: path.read_bytes() for path in out.iterdir()}
    for target in (Wrong(), Failing()):
        with pytest.raises(UserError):
            export(small("xcit", seed=1), target, out, overwrite=True)
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    assert everything(tmp_path) == ["out", "out/README.md", "out/export.json", "out/model.safetensors"]


def test_an_earlier_export_is_replaced_only_where_asked(tmp_path):
    out = tmp_path / "out"
    export(small("xcit"), Own(), out)
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match=r"out=.*out holds an export; overwrite=true replaces it"):
        export(small("xcit", seed=1), Own(), out)
    assert (out / "model.safetensors").read_bytes() == before
    export(small("xcit", seed=1), Own(), out, overwrite=True)
    assert (out / "model.safetensors").read_bytes() != before
    assert everything(tmp_path) == ["out", "out/README.md", "out/export.json", "out/model.safetensors"]


@pytest.mark.parametrize("content", [None, "{}", "[]", "no json"])
def test_a_folder_that_is_no_export_is_never_deleted(tmp_path, content):
    (tmp_path / "mine.txt").write_text("mine")
    if content is not None:
        (tmp_path / "export.json").write_text(content)
    with pytest.raises(UserError, match="exists and is no export of nestling"):
        export(small("xcit"), Own(), tmp_path, overwrite=True)
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_files_put_beside_an_export_are_never_deleted(tmp_path):
    out = tmp_path / "out"
    export(small("xcit"), Own(), out)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"out=.* holds notes\.txt besides an export"):
        export(small("xcit"), Own(), out, overwrite=True)
    assert (out / "notes.txt").read_text() == "mine"


def test_a_place_that_cannot_be_written_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match=r"out=.*file/out can't be written: Not a directory"):
        export(small("xcit"), Own(), tmp_path / "file/out")


def test_what_cannot_be_checked_is_said(tmp_path):
    record = export(small("xcit"), Unreadable(), tmp_path / "out")
    assert record["checked"] == "not checked: no_such_package is not installed"
    assert record["largest_difference"] is None


def test_a_nan_or_another_shape_is_a_difference():
    subject = small("xcit")

    def with_nan(images):
        features = subject.backbone(images)
        features.patches[-1, -1, -1] = float("nan")
        return features.cls, features.patches

    found, _ = difference(subject, with_nan, (32, 32))
    assert found != found
    found, _ = difference(subject, lambda images: (images, images), (32, 32))
    assert found == float("inf")


def test_the_difference_is_the_largest_of_any_feature():
    subject = small("xcit")

    def shifted(images):
        features = subject.backbone(images)
        features.cls[0, 3] -= 0.25
        features.patches[-1, -1, -1] += 0.5
        return features.cls, features.patches

    found, largest = difference(subject, shifted, (32, 48))
    assert found == pytest.approx(0.5, abs=1e-5)
    assert largest > 1
