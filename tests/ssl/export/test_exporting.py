"""An export is complete and compared, or absent."""

import errno
import json
import os
from importlib.metadata import version

import pytest
import torch
from export_subjects import MEAN, SIDE, STD, small

from nestling.ssl.errors import UserError
from nestling.ssl.export.exporting import difference, export, take_place
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


class Full(Own):
    """Written to a disk that is full."""

    def write(self, subject, folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Broken(Own):
    """Its program says that it can't load what was written."""

    def __init__(self, error):
        self.error = error

    def read(self, subject, folder):
        raise self.error


class UnreadableError(Own):
    """Loaded by a package that nobody has."""

    loader = "no_such_package"


def everything(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_the_record_says_all_that_a_reader_has_to_know(tmp_path):
    subject = small("xcit")
    record = export(subject, Own(), tmp_path / "out")
    assert record == json.loads((tmp_path / "out/export.json").read_text())
    assert record["backbone"] == {"name": "xcit_nano_12_p16", "options": subject.options}
    assert (record["network"], record["step"], record["checkpoint"]) == ("teacher", 7, "step_00000007")
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


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path):
    with pytest.raises(UserError, match=r"out=.*out can't be written: No space left on device"):
        export(small("xcit"), Full(), tmp_path / "out")
    assert everything(tmp_path) == []


@pytest.mark.parametrize("error", [ValueError, OSError, UserError])
def test_what_cannot_be_loaded_back_is_said_in_a_sentence(tmp_path, error):
    broken = Broken(error("no such model\nand much advice"))
    message = (
        r"xcit_nano_12_p16 exported to nestling can't be loaded back \(no such model\); nothing was left"
    )
    with pytest.raises(UserError, match=message):
        export(small("xcit"), broken, tmp_path / "out")
    assert everything(tmp_path) == []


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "out").mkdir()
    export(small("xcit"), Own(), tmp_path / "out")
    assert everything(tmp_path) == ["out", "out/README.md", "out/export.json", "out/model.safetensors"]


def test_the_working_directory_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"out=\. is the working directory"):
        export(small("xcit"), Own(), type(tmp_path)("."))


def test_a_link_leads_to_the_folder_that_is_replaced(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for overwrite in (False, True):
        export(small("xcit"), Own(), tmp_path / "link", overwrite)
    assert (tmp_path / "link").is_symlink()
    files = ["README.md", "export.json", "model.safetensors"]
    assert everything(tmp_path) == ["link", "real", *(f"real/{file}" for file in files)]


def test_a_kill_between_the_renames_loses_no_export(tmp_path):
    out = tmp_path / "out"
    export(small("xcit"), Own(), out)
    before = (out / "model.safetensors").read_bytes()
    for target, overwrite in ((Own(), False), (Failing(), True)):
        out.rename(tmp_path / ".out.old")
        (tmp_path / ".out.writing").mkdir(exist_ok=True)
        with pytest.raises(UserError, match=r"overwrite=true|no such thing"):
            export(small("xcit", seed=1), target, out, overwrite)
        assert (out / "model.safetensors").read_bytes() == before
        assert not (tmp_path / ".out.old").exists()


def test_a_rename_that_fails_puts_the_earlier_export_back(tmp_path):
    out = tmp_path / "out"
    export(small("xcit"), Own(), out)
    with pytest.raises(FileNotFoundError):
        take_place(tmp_path / "nothing", out)
    assert everything(tmp_path) == ["out", "out/README.md", "out/export.json", "out/model.safetensors"]


@pytest.mark.skipif(os.name == "nt", reason="Windows flushes no folders")
def test_the_rename_is_on_disk_before_the_earlier_export_goes(tmp_path, monkeypatch):
    out = tmp_path / "out"
    export(small("xcit"), Own(), out)
    flushed, fsync = [], os.fsync

    def watched(handle):
        flushed.append((os.fstat(handle).st_ino, (tmp_path / ".out.old").exists()))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", watched)
    export(small("xcit", seed=1), Own(), out, overwrite=True)
    assert flushed[-1] == (tmp_path.stat().st_ino, True)


def test_what_cannot_be_checked_is_said(tmp_path):
    record = export(small("xcit"), UnreadableError(), tmp_path / "out")
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
