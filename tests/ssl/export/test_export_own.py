"""nestling's own layout loads with one call, bit for bit."""

import json

import pytest
import torch
from export_subjects import FOREIGN, SMALL, small, write_run
from safetensors import safe_open

from nestling import backbones
from nestling.ssl.export.exporting import export
from nestling.ssl.export.own import Own
from nestling.ssl.export.subject import load_subject

VARIANTS = [*((family, {}) for family in SMALL), ("swin", {"padding": "attended"})]


@pytest.mark.parametrize(("family", "options"), VARIANTS)
def test_load_builds_the_same_network_from_the_folder_and_from_its_file(tmp_path, family, options):
    subject = small(family, **options)
    export(subject, Own(), tmp_path / "out")
    for path in (tmp_path / "out", tmp_path / "out/model.safetensors"):
        loaded = backbones.load(path).backbone
        assert loaded.name == subject.backbone.name
        state = loaded.state_dict()
        assert state.keys() == subject.backbone.state_dict().keys()
        assert all(torch.equal(state[key], value) for key, value in subject.backbone.state_dict().items())


def test_the_file_says_what_builds_it_and_where_it_comes_from(tmp_path):
    subject = small("xcit")
    export(subject, Own(), tmp_path / "out")
    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        said = json.loads(file.metadata()["nestling"])
    assert said == subject.facts()
    assert said["backbone"] == {"name": "xcit_nano_12_p16", "options": subject.options}
    assert (said["network"], said["step"]) == ("teacher", 7)


@pytest.mark.parametrize(
    "family", ["custom", *(pytest.param(name, marks=pytest.mark.slow) for name in ("timm", "torchvision"))]
)
def test_a_run_of_a_foreign_network_is_loaded_back_by_its_name(tmp_path, family):
    subject = load_subject(write_run(tmp_path / "run", family), "teacher")
    record = export(subject, Own(), tmp_path / "out")
    assert record["sizes"] == {"64x64": 0}
    loaded = backbones.load(tmp_path / "out", FOREIGN[family][0]).backbone.state_dict()
    wanted = subject.backbone.state_dict()
    assert loaded.keys() == wanted.keys()
    assert all(torch.equal(loaded[key], value) for key, value in wanted.items())


@pytest.mark.parametrize("network", ["teacher", "student"])
def test_what_is_handed_on_holds_no_path_of_its_maker(tmp_path, network):
    subject = load_subject(write_run(tmp_path / "run", "xcit"), network)
    export(subject, Own(), tmp_path / "out")
    assert json.loads((tmp_path / "out/export.json").read_text())["checkpoint"] == "step_00000007"
    for path in (tmp_path / "out").iterdir():
        assert str(tmp_path).encode() not in path.read_bytes(), path.name


def test_every_tensor_is_float32(tmp_path):
    subject = small("vit")
    Own().write(subject, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert {file.get_tensor(key).dtype for key in file.keys()} == {torch.float32}  # noqa: SIM118


@pytest.mark.parametrize("family", ["vit", "custom"])
def test_the_readme_loads_what_it_says(tmp_path, family):
    subject = small(family)
    Own().write(subject, tmp_path)
    code = [line[4:] for line in (tmp_path / "README.md").read_text().splitlines() if line.startswith("    ")]
    program = "\n".join(code).replace("path/of/this/folder", str(tmp_path))
    found = {"images": torch.randn(2, 3, 64, 64)}
    with torch.no_grad():
        exec(program, found)
        assert torch.equal(found["features"].cls, subject.backbone(found["images"]).cls)
