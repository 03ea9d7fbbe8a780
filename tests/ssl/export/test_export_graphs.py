"""Graphs with free axes: ONNX and torch.export, equal at sizes they were not traced at."""

import json
import sys
from pathlib import Path
from zipfile import ZipFile

import onnx
import onnxruntime
import pytest
import torch
from export_subjects import MEAN, SMALL, small

from nestling.ssl.errors import UserError
from nestling.ssl.export.exporting import difference, export
from nestling.ssl.export.graph import smallest_side
from nestling.ssl.export.onnx import OPSET, Onnx
from nestling.ssl.export.torch_export import TorchExport

OTHERS = {"xcit": [(224, 224), (17, 250)], "vit": [(224, 224), (32, 240)], "swin": [(224, 224), (96, 250)]}


@pytest.fixture(scope="session", params=SMALL)
def family(request):
    return request.param


@pytest.fixture(scope="session")
def subject(family):
    found = small(family, depth=1)
    if family == "swin":  # tracing it takes seconds per block: the largest grid's and the smallest's stay
        for stage in found.backbone.layers[1:3]:
            del stage.blocks[:]
        for block in found.backbone.layers[3].blocks:
            block.attn.masked = False  # as published weights are padded; a graph of each kind would take long
    return found


@pytest.fixture(scope="session")
def exported(subject, tmp_path_factory):
    """Folder of each target, exported once."""
    place = tmp_path_factory.mktemp(subject.name)
    records = {
        target.name: export(subject, target, place / target.name) for target in (Onnx(), TorchExport())
    }
    return place, records


@pytest.fixture(scope="session")
def networks(exported, subject):
    """What each target's program loads, once."""
    place, _ = exported
    return {target.name: target.read(subject, place / target.name) for target in (Onnx(), TorchExport())}


@pytest.mark.slow
def test_the_record_states_the_difference_at_two_sizes(exported, subject):
    _, records = exported
    for name, record in records.items():
        assert len(record["sizes"]) == 2, name
        assert record["largest_difference"] < 1e-4
        assert record["smallest_side"] == smallest_side(subject.backbone)
    assert records["onnx"]["opset"] == OPSET


@pytest.mark.slow
@pytest.mark.parametrize("target", ["onnx", "torch_export"])
def test_a_graph_agrees_at_sizes_it_was_not_traced_at(networks, subject, family, target):
    network = networks[target]
    smallest = smallest_side(subject.backbone)
    for batch, size in zip((1, 3, 4), [*OTHERS[family], (smallest, smallest)], strict=True):
        found, largest = difference(subject, network, size, batch)
        assert found < 1e-4 * max(1, largest), size


@pytest.mark.slow
def test_the_onnx_file_is_valid_and_says_what_it_is(exported, subject):
    model = onnx.load(exported[0] / "onnx/model.onnx")
    onnx.checker.check_model(model)
    assert {entry.domain: entry.version for entry in model.opset_import}[""] == OPSET
    said = {entry.key: entry.value for entry in model.metadata_props}
    assert said["network"] == "teacher"
    assert all(not node.metadata_props for node in model.graph.node)
    assert str(Path(torch.__file__).parent).encode() not in model.SerializeToString()
    assert json.loads(said["backbone"])["name"] == subject.name
    assert (json.loads(said["step"]), json.loads(said["mean"])) == (7, MEAN)


@pytest.mark.slow
def test_a_traced_file_holds_no_path_of_its_maker(exported, repository):
    with ZipFile(exported[0] / "torch_export/model.pt2") as archive:
        for name in archive.namelist():
            content = archive.read(name)
            assert str(repository).encode() not in content, name
            assert str(Path(torch.__file__).parent).encode() not in content, name


@pytest.mark.slow
def test_onnx_names_its_inputs_outputs_and_axes(exported, subject):
    session = onnxruntime.InferenceSession(exported[0] / "onnx/model.onnx")
    (images,) = session.get_inputs()
    assert (images.name, images.shape) == ("images", ["batch", 3, "height", "width"])
    cls, patches = session.get_outputs()
    assert (cls.name, cls.shape) == ("cls", ["batch", subject.backbone.embed_dim])
    assert (patches.name, patches.shape) == ("patches", ["batch", "patches", subject.backbone.embed_dim])


@pytest.mark.slow
def test_a_traced_graph_refuses_a_size_below_its_smallest(networks, subject):
    side = smallest_side(subject.backbone) - 1
    with pytest.raises(AssertionError, match="Guard failed"):
        networks["torch_export"](torch.zeros(1, 3, side, side))


@pytest.mark.slow
@pytest.mark.parametrize("target", [Onnx(), TorchExport()], ids=lambda target: target.name)
def test_a_foreign_networks_graph_takes_the_runs_images_in_any_number(tmp_path, target):
    subject = small("timm")
    record = export(subject, target, tmp_path / "out")
    assert (record["only_side"], list(record["sizes"])) == (64, ["64x64"])
    network = target.read(subject, tmp_path / "out")
    found, largest = difference(subject, network, (64, 64), batch=5)
    assert found < 1e-4 * max(1, largest)
    with pytest.raises(Exception, match=r"Guard failed|Expected: 64"):
        network(torch.zeros(2, 3, 96, 96))


def test_a_network_that_cannot_be_traced_is_refused_in_a_sentence(tmp_path):
    subject = small("custom")
    subject.backbone.model.register_forward_hook(lambda _, inputs, output: output if output.max() else None)
    message = (
        r"export_subjects:Patches can't be traced with free batch at 64 x 64 pixels \(.*; another target"
    )
    with pytest.raises(UserError, match=message):
        export(subject, TorchExport(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_weights_beyond_what_a_file_holds_are_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr("nestling.ssl.export.onnx.LIMIT", 10_000)
    with pytest.raises(UserError, match=r"--to onnx: xcit_nano_12_p16 has .* GiB of weights"):
        export(small("xcit"), Onnx(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_a_missing_package_is_named_with_its_remedy(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"--to onnx needs {package}.*pip install 'nestling\[export\]'"):
        export(small("xcit"), Onnx(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
