"""Reading a file runs nothing of it, and what can't be read is refused by name."""

import argparse
import json
import os
import pathlib
import pickle
import struct
import warnings
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file

from nestling import backbones
from nestling.backbones.weights.files import Inert, read_file

TENSORS = {"norm.weight": torch.arange(4.0)}


class Attack:
    """Calls a function with an argument when it is unpickled."""

    def __init__(self, function, argument):
        self.call = function, (argument,)

    def __reduce__(self):
        return self.call


class Opinion:
    """A class of the user's, gone when the file is read elsewhere."""

    def __init__(self):
        self.weight = 3


class Loud:
    """Leaves a trace wherever its code runs."""

    traces: ClassVar[list[str]] = []

    def __init__(self):
        self.traces.append("init")

    def __setstate__(self, state):
        self.traces.append("setstate")

    def __reduce__(self):
        return Loud, (), {"a": 1}


class ConfigNode(dict):
    """A dictionary with attributes, as yacs and mmcv have for configurations."""

    traces: ClassVar[list[str]] = []

    def __init__(self, **values):
        super().__init__(values)
        self.frozen = True

    def __setitem__(self, key, value):
        self.traces.append(key)
        super().__setitem__(key, value)


class Items(list):
    """A list of its own kind."""


class StateDict(OrderedDict):
    """A dictionary of tensors of its own kind."""


def saved(path, content, legacy=False):
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    return path


def assert_holds_the_tensors(content):
    assert torch.equal(content["model"]["norm.weight"], TENSORS["norm.weight"])


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    "foreign",
    [
        argparse.Namespace(arch="vit_small", lr=0.1, nested=argparse.Namespace(a=1)),
        pathlib.PurePosixPath("/data/imagenet"),
        Opinion(),
        [Opinion(), {"args": argparse.Namespace()}],
        torch.optim.lr_scheduler.StepLR,
    ],
)
def test_tensors_load_beside_foreign_objects(foreign, legacy, tmp_path):
    path = saved(tmp_path / "full.pth", {"model": TENSORS, "args": foreign, "epoch": 3}, legacy)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)
    content = read_file(path).content
    assert_holds_the_tensors(content)
    assert content["epoch"] == 3


@pytest.mark.parametrize("legacy", [False, True])
def test_foreign_dictionaries_and_lists_become_plain_ones(legacy, tmp_path):
    config = ConfigNode(lr=0.1, optim=ConfigNode(name="adamw"), sizes=Items([224, Items([96])]))
    others = {"last": deque([1, 2]), "votes": Counter("aab"), "empty": ConfigNode()}
    path = saved(tmp_path / "full.pth", {"model": StateDict(TENSORS), "config": config, **others}, legacy)
    ConfigNode.traces.clear()
    content = read_file(path).content
    assert_holds_the_tensors(content)
    assert content["config"] == {"lr": 0.1, "optim": {"name": "adamw"}, "sizes": [224, [96]]}
    assert content["last"] == [1, 2]
    kinds = {type(each) for each in (content["model"], content["config"], content["last"], content["empty"])}
    assert kinds == {OrderedDict, list}
    assert ConfigNode.traces == []
    torch.load(path, weights_only=False)
    assert ConfigNode.traces  # so the file would have run it


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("foreign", [range(3), int, str, set, {1, 2}, [frozenset([1]), slice(1, 2)], 1j])
def test_pythons_own_objects_do_not_hinder_under_python_2s_names_either(foreign, legacy, tmp_path):
    path = saved(tmp_path / "full.pth", {"model": TENSORS, "x": foreign}, legacy)
    assert_holds_the_tensors(read_file(path).content)


def test_a_module_beside_the_tensors_hinders_only_in_the_old_format(tmp_path):
    content = {"model": TENSORS, "net": torch.nn.Linear(2, 2)}
    assert_holds_the_tensors(read_file(saved(tmp_path / "new.pth", content)).content)
    with pytest.raises(ValueError, match=r"old\.pth can't.*\(it holds a whole pickled module in the format"):
        read_file(saved(tmp_path / "old.pth", content, legacy=True))


@pytest.mark.parametrize("legacy", [False, True])
def test_what_the_reader_has_no_means_for_is_refused_with_its_reason(legacy, tmp_path):
    items = Items([1])
    items.name = "sizes"
    path = saved(tmp_path / "full.pth", {"model": TENSORS, "sizes": items}, legacy)
    with pytest.raises(
        ValueError, match=r"full\.pth can't be read as weights alone \(Can only .*Items\); save"
    ):
        read_file(path)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_name_that_no_class_could_bear_does_not_hinder(legacy, tmp_path):
    path = saved(tmp_path / "full.pth", {"model": TENSORS, "x": Opinion()}, legacy)
    path.write_bytes(path.read_bytes().replace(b"Opinion", b"Op\0nion"))  # the archive's checksum isn't read
    assert_holds_the_tensors(read_file(path).content)


@pytest.mark.parametrize("legacy", [False, True])
def test_numpy_scalars_and_random_states_do_not_hinder(legacy, tmp_path):
    numpy = pytest.importorskip("numpy")
    foreign = {"best": numpy.float64(0.5), "rng": numpy.random.get_state(), "type": numpy.dtype("float32")}
    path = saved(tmp_path / "full.pth", {"model": TENSORS, **foreign}, legacy)
    assert_holds_the_tensors(read_file(path).content)


def test_an_omegaconf_config_does_not_hinder(tmp_path):
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({"optim": {"lr": 0.1}, "sizes": [224, 96]})
    path = saved(tmp_path / "full.pth", {"model": TENSORS, "config": config})
    assert_holds_the_tensors(read_file(path).content)


def test_a_default_dictionary_keeps_its_tensors(tmp_path):
    path = saved(tmp_path / "full.pth", {"model": defaultdict(list, TENSORS)})
    content = read_file(path).content
    assert type(content["model"]) is OrderedDict
    assert_holds_the_tensors(content)


@pytest.mark.parametrize("legacy", [False, True])
def test_code_of_a_class_that_exists_is_not_run(legacy, tmp_path):
    path = saved(tmp_path / "full.pth", {"model": TENSORS, "loud": Loud()}, legacy)
    Loud.traces.clear()
    content = read_file(path).content
    assert Loud.traces == []
    assert isinstance(content["loud"], Inert)
    assert "Loud" in repr(content["loud"])
    torch.load(path, weights_only=False)
    assert Loud.traces == ["init", "setstate"]  # so the file would have run it


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("function", [eval, exec])
def test_a_call_of_a_builtin_runs_nothing(function, legacy, tmp_path):
    trace = tmp_path / "trace"
    attack = Attack(function, f"open({str(trace)!r}, 'w').close()")
    path = saved(tmp_path / "bad.pth", {"model": TENSORS, "x": attack}, legacy)
    assert_holds_the_tensors(read_file(path).content)
    assert not trace.exists()
    torch.load(path, weights_only=False)
    assert trace.exists()


@pytest.mark.parametrize("legacy", [False, True])
def test_a_call_of_the_shell_runs_nothing_and_is_refused(legacy, tmp_path):
    trace = tmp_path / "trace"
    path = saved(tmp_path / "bad.pth", {"model": TENSORS, "x": Attack(os.system, f"touch {trace}")}, legacy)
    with pytest.raises(ValueError, match=r"bad\.pth asks to call (posix|nt)\.system"):
        read_file(path)
    assert not trace.exists()
    torch.load(path, weights_only=False)
    assert trace.exists()


def test_stand_ins_are_gone_after_reading(tmp_path):
    path = saved(tmp_path / "full.pth", {"model": TENSORS, "args": argparse.Namespace()})
    before = set(torch.serialization.get_safe_globals())
    read_file(path)
    assert set(torch.serialization.get_safe_globals()) == before


def test_a_whole_pickled_module_is_refused_by_name(tmp_path):
    path = saved(tmp_path / "module.pth", torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"Linear.*state_dict\(\)"):
        backbones.load(path)


def damaged_zip(path):
    saved(path, {"model": {"a": torch.zeros(1000)}})
    path.write_bytes(path.read_bytes()[:3000])


def torchscript(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions deprecate what older files hold
        torch.jit.script(torch.nn.Linear(2, 2)).save(str(path))


def other_zip(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", "x")


def damaged_legacy(path):
    saved(path, {"model": {"a": torch.zeros(1000)}}, legacy=True)
    path.write_bytes(path.read_bytes()[:2000])


def damaged_safetensors(path):
    save_file({"a": torch.zeros(1000)}, path)
    path.write_bytes(path.read_bytes()[:2000])


def lying_safetensors(path):
    path.write_bytes(struct.pack("<Q", 1 << 40) + b'{"a": 1}')


FAULTS = {
    "empty": (lambda path: path.touch(), "is empty"),
    "html": (lambda path: path.write_text("\n<!DOCTYPE html><html>404</html>"), "web page"),
    "lfs": (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid"), "Git LFS"),
    "text": (lambda path: path.write_text("learning rate 0.1"), "neither safetensors nor written by torch"),
    "bytes": (
        lambda path: path.write_bytes(bytes(range(7, 200))),
        "neither safetensors nor written by torch",
    ),
    "short": (lambda path: path.write_bytes(b"\x80"), "damaged, or a pickle"),
    "pickle": (lambda path: path.write_bytes(pickle.dumps({"a": 1})), "pickle that torch.save did not write"),
    "cut zip": (damaged_zip, "damaged or cut short"),
    "cut legacy": (damaged_legacy, "can't be read as weights alone"),
    "cut safetensors": (damaged_safetensors, "damaged safetensors"),
    "lying safetensors": (lying_safetensors, "damaged safetensors"),
    "other zip": (other_zip, "torch.save did not write"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["weights.pth", "model.safetensors"])
def test_a_faulty_file_is_refused_in_one_sentence_that_names_it(fault, name, tmp_path):
    write, message = FAULTS[fault]
    path = tmp_path / name
    write(path)
    with pytest.raises(ValueError, match=message) as caught:
        backbones.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_torchscript_is_refused(tmp_path):
    torchscript(tmp_path / "program.pt")
    with pytest.raises(ValueError, match=r"program\.pt is a TorchScript program"):
        backbones.load(tmp_path / "program.pt")


@pytest.mark.parametrize("name", ["absent.pth", "absent.safetensors", "no/folder"])
def test_a_missing_path_is_refused_by_name(name, tmp_path):
    with pytest.raises(ValueError, match=f"{name}: no such file"):
        backbones.load(tmp_path / name)


def test_metadata_come_with_safetensors_only(tmp_path):
    save_file(TENSORS, tmp_path / "a.safetensors", {"nestling": json.dumps({})})
    assert read_file(tmp_path / "a.safetensors").metadata == {"nestling": "{}"}
    assert read_file(saved(tmp_path / "a.pth", TENSORS)).metadata == {}


@pytest.mark.parametrize("suffix", ["pth", "safetensors", "bin"])
def test_the_content_decides_and_not_the_name(suffix, tmp_path):
    path = saved(tmp_path / f"a.{suffix}", TENSORS)
    assert torch.equal(read_file(path).content["norm.weight"], TENSORS["norm.weight"])
    save_file(TENSORS, path)
    assert torch.equal(read_file(path).content["norm.weight"], TENSORS["norm.weight"])
