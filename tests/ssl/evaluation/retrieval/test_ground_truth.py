"""Ground truth is read without running what a pickle asks for, and wrong content is named."""

import io
import json
import os
import pickle

import numpy as np
import pytest

from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.retrieval.ground_truth import find_ground_truth, read_ground_truth


def content(as_array=list):
    entry = {
        "easy": as_array([1, 2]),
        "hard": as_array([0]),
        "junk": as_array([3]),
        "bbx": as_array([1.5, 2, 9, 8]),
    }
    return {"imlist": ["a", "b", "c", "d"], "qimlist": ["q"], "gnd": [entry]}


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("as_array", [list, np.array])
def test_plain_pickles_of_every_protocol_are_read(tmp_path, protocol, as_array):
    (tmp_path / "gnd_x.pkl").write_bytes(pickle.dumps(content(as_array), protocol))
    truth = read_ground_truth(find_ground_truth(tmp_path))
    (query,) = truth.queries
    assert truth.images == ["a", "b", "c", "d"]
    assert (query.name, query.box) == ("q", (1.5, 2.0, 9.0, 8.0))
    assert (query.easy.tolist(), query.hard.tolist(), query.junk.tolist()) == ([1, 2], [0], [3])


def test_numpy_scalars_and_the_module_names_of_numpy_1_are_read(tmp_path):
    changed = content()
    changed["gnd"][0]["easy"] = [np.int64(1), np.int32(2)]
    changed["gnd"][0]["hard"] = np.array([0])
    written = pickle.dumps(changed, 0)
    assert b"numpy._core" in written
    (tmp_path / "old.pkl").write_bytes(written.replace(b"numpy._core", b"numpy.core"))
    (query,) = read_ground_truth(tmp_path / "old.pkl").queries
    assert (query.easy.tolist(), query.hard.tolist()) == ([1, 2], [0])


def test_json_says_the_same(tmp_path):
    (tmp_path / "gnd_x.json").write_text(json.dumps(content()))
    (query,) = read_ground_truth(tmp_path / "gnd_x.json").queries
    assert query.easy.tolist() == [1, 2]


class Writes:
    """Pickled, a call that leaves a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_would_run_code_is_refused_before_it_runs(tmp_path):
    (tmp_path / "evil.pkl").write_bytes(pickle.dumps({**content(), "more": Writes(tmp_path / "made")}))
    with pytest.raises(UserError, match=r"evil\.pkl asks for \w+\.mkdir, .*a pickle can run code"):
        read_ground_truth(tmp_path / "evil.pkl")
    assert not (tmp_path / "made").exists()
    pickle.load(io.BytesIO((tmp_path / "evil.pkl").read_bytes()))  # it would have
    assert (tmp_path / "made").exists()


def changed(**values):
    whole = content()
    whole["gnd"][0] |= values
    return whole


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([1], r"must be a dict with imlist, qimlist and gnd"),
        ({**content(), "qimlist": ["q", "r"]}, r"qimlist has 2 queries and gnd 1"),
        ({**content(), "imlist": []}, r"at least one each"),
        ({**content(), "gnd": [{"easy": []}]}, r"query q lacks hard, junk"),
        (changed(easy=[4]), r"q: easy must hold places in imlist, whole numbers from 0 to 3"),
        (changed(hard=["x"]), r"q: hard must be a list of places"),
        (changed(junk=[1]), r"stands twice among easy, hard and junk of q"),
        (changed(bbx=[5, 5, 5, 9]), r"bbx of q must be left, top, right, bottom"),
    ],
)
def test_wrong_content_is_named(tmp_path, wrong, message):
    (tmp_path / "x.json").write_text(json.dumps(wrong))
    with pytest.raises(UserError, match=message):
        read_ground_truth(tmp_path / "x.json")


def test_broken_files_and_several_of_them_are_named(tmp_path):
    (tmp_path / "gnd_a.pkl").write_bytes(pickle.dumps(content())[:-9])
    with pytest.raises(UserError, match=r"gnd_a\.pkl can't be read as ground truth"):
        read_ground_truth(tmp_path / "gnd_a.pkl")
    (tmp_path / "gnd_b.json").write_text("{}")
    with pytest.raises(UserError, match=r"holds 2 files .*\(gnd_a\.pkl, gnd_b\.json\)"):
        find_ground_truth(tmp_path)
