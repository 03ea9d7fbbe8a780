"""A checkpoint whose files were damaged is seen, named and passed over."""

import logging
import re
import shutil

import pytest
from small_checkpoint import small_checkpoint

from nestling.ssl.errors import UserError
from nestling.ssl.run import checkpoints, manifest
from nestling.ssl.run.loading import find_checkpoint


@pytest.fixture
def run(tmp_path):
    """A run of three checkpoints, the second its best."""
    for step in (1, 2, 3):
        checkpoints.save(small_checkpoint(step), tmp_path, keep_last=3, is_best=step == 2)
    return tmp_path


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


def flip(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


DAMAGES = [
    (cut, r"{} has \d+ bytes instead of \d+"),
    (flip, r"{} is not what was written \(its checksum differs\)"),
    (lambda file: file.unlink(), "{} is missing"),
    (lambda file: (file.unlink(), file.mkdir()), r"{} (has|can't be read)"),
]
FILES = ["student.safetensors", "teacher.safetensors", "terms.safetensors", "optimizer.pt", "trainer.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(("damage", "fault"), DAMAGES)
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_taken(run, caplog, name, damage, fault):
    damage(run / "checkpoints/step_00000003" / name)
    assert checkpoints.newest(run).name == "step_00000002"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "step_00000003 is damaged and passed over: " in record.message
    assert re.search(fault.format(name), record.message), record.message


def test_every_file_of_a_checkpoint_is_in_its_manifest(run):
    folder = run / "checkpoints/step_00000003"
    for file in sorted(folder.iterdir()):
        assert manifest.problem(folder) is None
        kept = file.read_bytes()
        file.unlink()
        assert manifest.problem(folder) == f"{file.name} is missing"
        file.write_bytes(kept)
        shutil.copystat(folder / "config.yaml", file)
    assert manifest.problem(folder) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"files": {"student.safetensors": 3}}', "\xff"])
def test_a_damaged_manifest_is_damage(run, content):
    path = run / "checkpoints/step_00000003" / manifest.FILE
    path.write_bytes(content.encode("latin-1"))
    assert manifest.problem(path.parent) == "manifest.json is damaged"
    assert checkpoints.newest(run).name == "step_00000002"


def test_the_same_damage_is_said_once(run, caplog):
    cut(run / "checkpoints/step_00000003/optimizer.pt")
    for _ in range(3):
        checkpoints.newest(run)
    assert len(caplog.records) == 1


def test_where_none_is_whole_one_sentence_says_so(run):
    for folder in checkpoints.saved(run):
        cut(folder / "teacher.safetensors")
    sentence = (
        r"^none of the 3 checkpoints in .* is whole \(the newest, step_00000003: teacher\.safetensors has"
    )
    with pytest.raises(UserError, match=sentence):
        checkpoints.newest(run)
    with pytest.raises(UserError, match=sentence):
        find_checkpoint(run)


def test_evaluation_takes_the_newest_sound_one_where_the_best_is_damaged(run, caplog):
    assert find_checkpoint(run).name == "step_00000002"
    flip(run / "checkpoints/step_00000002/teacher.safetensors")
    assert find_checkpoint(run).name == "step_00000003"
    assert "step_00000002 is damaged and passed over: teacher.safetensors" in caplog.text


def test_evaluation_does_not_mind_what_it_does_not_read(run):
    cut(run / "checkpoints/step_00000002/optimizer.pt")
    assert find_checkpoint(run).name == "step_00000002"


def test_a_file_is_read_once_however_often_it_is_asked_for(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"content")
    manifest._digest.cache_clear()
    assert manifest.digest(file) == manifest.digest(file)
    assert manifest._digest.cache_info().misses == 1


def test_a_run_that_goes_on_from_an_earlier_one_drops_the_damaged_later_ones(run):
    cut(run / "checkpoints/step_00000003/optimizer.pt")
    checkpoints.save(small_checkpoint(2), run, keep_last=3, is_best=False)
    assert [path.name for path in checkpoints.saved(run)] == ["step_00000001", "step_00000002"]
    assert checkpoints.newest(run).name == "step_00000002"
