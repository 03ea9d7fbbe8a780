"""nestling's own layout loads with one call, bit for bit."""

import json

import pytest
import torch
from export_subjects import SMALL, small
from safetensors import safe_open

from nestling import backbones
from nestling.ssl.export.exporting import export
from nestling.ssl.export.own import Own


@pytest.mark.parametrize("family", SMALL)
def test_load_builds_the_same_network_from_the_folder_and_from_its_file(tmp_path, family):
    subject = small(family)
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
    assert "RUN" not in json.dumps(said)  # a file that is handed on shows no path of its maker


def test_every_tensor_is_float32(tmp_path):
    subject = small("vit")
    Own().write(subject, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert {file.get_tensor(key).dtype for key in file.keys()} == {torch.float32}  # noqa: SIM118


def test_the_readme_loads_what_it_says(tmp_path):
    subject = small("vit")
    Own().write(subject, tmp_path)
    code = [line[4:] for line in (tmp_path / "README.md").read_text().splitlines() if line.startswith("    ")]
    program = "\n".join(code).replace("path/of/this/folder", str(tmp_path))
    found = {"images": torch.randn(2, 3, 64, 64)}
    with torch.no_grad():
        exec(program, found)
        assert torch.equal(found["features"].cls, subject.backbone(found["images"]).cls)
