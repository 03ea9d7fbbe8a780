"""Our runs, checkpoints and exports; what name and options a set of tensors gets; what overrides them."""

import json

import pytest
import torch
from foreign_networks import images, largest, stirred
from safetensors.torch import save_file

from nestling import backbones
from nestling.backbones.weights import read
from nestling.backbones.weights.identify import FAMILIES, family_of, identify, nearest_name

OPTIONS = {"depth": 2, "embed_dim": 64, "num_heads": 2}


def ours(name="xcit_tiny_12_p16", seed=0, **options):
    torch.manual_seed(0)
    return stirred(backbones.create(name, **{**OPTIONS, **options}), seed)


def metadata(name, **options):
    return {"nestling": json.dumps({"backbone": {"name": name, "options": options}})}


def same(backbone, other):
    with torch.no_grad():
        return largest(backbone.double()(images(64)).cls - other.double()(images(64)).cls) == 0


def checkpoint(folder, networks, described=True):
    """As pretraining writes it."""
    folder.mkdir(parents=True)
    for network, backbone in networks.items():
        tensors = {f"backbone.{key}": value.contiguous() for key, value in backbone.state_dict().items()}
        tensors["head.mlp.0.weight"] = torch.zeros(2, 2)
        file = folder / f"{network}.safetensors"
        save_file(tensors, file, metadata(backbone.name, **OPTIONS) if described else None)
    return folder


@pytest.fixture
def run(tmp_path):
    """A run directory of three checkpoints, the middle one its best, each pair of networks another."""
    networks = {}
    for number, step in enumerate((900, 1000, 11000)):
        pair = {"student": ours(seed=2 * number), "teacher": ours(seed=2 * number + 1)}
        networks[step] = pair
        checkpoint(tmp_path / "run" / "checkpoints" / f"step_{step:08d}", pair)
    (tmp_path / "run" / "last").write_text("checkpoints/step_00011000\n")
    (tmp_path / "run" / "best").write_text("checkpoints/step_00001000\n")
    return tmp_path / "run", networks


@pytest.mark.parametrize("network", ["teacher", "student"])
def test_a_run_directory_is_its_best_checkpoint_else_its_last_else_its_newest(network, run):
    folder, networks = run
    for step, gone in ((1000, "best"), (11000, "last"), (11000, None)):
        backbone, report = backbones.load(folder, network=network)
        assert same(backbone, networks[step][network])
        assert (report.layout, report.network, report.unexpected) == (
            "nestling",
            network,
            ("head.mlp.0.weight",),
        )
        if gone:
            (folder / gone).unlink()


def test_a_pointer_to_a_checkpoint_that_is_gone_is_passed_over(run):
    folder, networks = run
    (folder / "best").write_text("checkpoints/step_00000001")
    assert same(backbones.load(folder).backbone, networks[11000]["teacher"])


def test_a_checkpoint_folder_and_a_file_of_it_are_read(run):
    folder, networks = run
    place = folder / "checkpoints" / "step_00000900"
    assert same(backbones.load(place).backbone, networks[900]["teacher"])
    backbone, report = backbones.load(place / "student.safetensors")
    assert same(backbone, networks[900]["student"])
    assert report.network == "student"


def test_a_checkpoint_without_metadata_is_known_by_its_tensors(tmp_path):
    pair = {"teacher": ours(), "student": ours(seed=1)}
    backbone, report = backbones.load(checkpoint(tmp_path / "step_00000001", pair, described=False))
    assert same(backbone, pair["teacher"])
    assert (report.layout, report.network) == ("XCiT", "teacher")


def test_a_checkpoint_that_lacks_the_network_is_refused(tmp_path):
    folder = checkpoint(tmp_path / "step_00000001", {"student": ours()})
    with pytest.raises(ValueError, match=r"teacher\.safetensors: no such file"):
        backbones.load(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "weights.pth"])
def test_an_exported_folder_is_read(name, tmp_path):
    network = ours()
    if name.endswith(".pth"):
        torch.save(network.state_dict(), tmp_path / name)
    else:
        save_file(network.state_dict(), tmp_path / name, metadata(network.name, **OPTIONS))
    assert same(backbones.load(tmp_path).backbone, network)


@pytest.mark.parametrize(("files", "listed"), [(["a.pth", "b.pth"], r"a\.pth, b\.pth"), ([], "none of")])
def test_a_folder_without_one_file_of_weights_is_refused(files, listed, tmp_path):
    for file in files:
        (tmp_path / file).touch()
    with pytest.raises(ValueError, match=rf"without one file of weights \({listed}"):
        backbones.load(tmp_path)


def test_metadata_settle_what_no_tensor_shows(tmp_path):
    options = {**OPTIONS, "interpolate_offset": 0.1, "num_heads": 4, "position_size": 64}
    network = backbones.create("vit_tiny_p16", **options)
    save_file(network.state_dict(), tmp_path / "a.safetensors", metadata("vit_tiny_p16", **options))
    backbone, _ = backbones.load(tmp_path / "a.safetensors")
    assert (backbone.offset, backbone.blocks[0].attn.num_heads) == (0.1, 4)
    backbone, _ = backbones.load(tmp_path / "a.safetensors", interpolate_offset=0.0)
    assert backbone.offset == 0.0


@pytest.mark.parametrize("content", ["{", "{}", '{"backbone": 3}', '{"backbone": {"name": "a"}}'])
def test_damaged_metadata_are_refused(content, tmp_path):
    save_file(ours().state_dict(), tmp_path / "a.safetensors", {"nestling": content})
    with pytest.raises(ValueError, match=r"a\.safetensors: its metadata 'nestling'"):
        backbones.load(tmp_path / "a.safetensors")


def test_a_file_can_not_have_a_module_imported(tmp_path, monkeypatch):
    (tmp_path / "intruder.py").write_text(f"open({str(tmp_path / 'trace')!r}, 'w').close()")
    monkeypatch.syspath_prepend(tmp_path)
    save_file(ours().state_dict(), tmp_path / "a.safetensors", metadata("intruder:Network"))
    with pytest.raises(ValueError, match=r"code outside nestling; say name='intruder:Network'"):
        backbones.load(tmp_path / "a.safetensors")
    assert not (tmp_path / "trace").exists()


def test_another_name_than_the_metadatas_is_refused(tmp_path):
    save_file(ours().state_dict(), tmp_path / "a.safetensors", metadata("xcit_tiny_12_p16", **OPTIONS))
    with pytest.raises(ValueError, match="holds xcit_tiny_12_p16, not xcit_tiny_12_p8"):
        backbones.load(tmp_path / "a.safetensors", "xcit_tiny_12_p8")


@pytest.mark.parametrize("name", [name for _, variants in FAMILIES.values() for name in variants])
def test_every_registered_network_is_known_by_its_tensors(name):
    with torch.device("meta"):
        tensors = backbones.create(name).state_dict()
    family = family_of(name)
    known = {"tokens_norm": "nano" not in name} if family == "xcit" else {}
    assert nearest_name(family, identify(family, tensors, known)) == (name, {})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_p16", {"in_chans": 4, "registers": 2, "mask_token": True, "position_size": 64}),
        ("vit_small_p14", {"ffn": "swiglu", "layer_scale": 1e-5, "qkv_bias": False, "depth": 3}),
        ("vit_tiny_p16", {"patch": 32, "mlp_ratio": 1.7, "pyramid": False}),
        ("swin_tiny_w7", {"window": 5, "position": "both", "position_size": 64, "qkv_bias": False}),
        ("swin_tiny_w14", {"embed_dim": 48, "num_heads": 6, "mlp_ratio": 2.0, "pyramid": True}),
        ("xcit_tiny_12_p8", {"cls_depth": 1, "num_heads": 6, "in_chans": 1}),
    ],
)
def test_what_departs_from_a_name_becomes_an_option(name, options):
    with torch.device("meta"):
        tensors = backbones.create(name, **options).state_dict()
    family = family_of(name)
    found, rest = nearest_name(
        family, identify(family, tensors, {"tokens_norm": True} if family == "xcit" else {})
    )
    with torch.device("meta"):
        again = backbones.create(found, **rest).state_dict()
    assert {key: value.shape for key, value in again.items()} == {key: x.shape for key, x in tensors.items()}
    assert rest.keys() <= options.keys()


def test_a_name_and_options_override_what_was_found(tmp_path):
    network = ours("vit_tiny_p16", num_heads=1)
    torch.save(network.state_dict(), tmp_path / "a.pth")
    weights = read(tmp_path / "a.pth", name="vit_base_p8", num_heads=2, drop_path=0.1)
    assert weights.name == "vit_base_p8"
    assert weights.options["patch"] == 16
    backbone, _ = backbones.load(tmp_path / "a.pth", "vit_base_p8", num_heads=2, drop_path=0.1)
    assert (backbone.name, backbone.blocks[1].drop_path.rate) == ("vit_base_p8", 0.1)
    assert backbone.blocks[0].attn.num_heads == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position_size": 64}, r"pos_embed is \(1, 197, 64\) in the file and \(1, 17, 64\)"),
        ({"depth": 3}, r"missing are blocks\.2\.norm1\.weight"),
        ({"in_chans": 1}, r"patch_embed\.proj\.weight is \(64, 3, 16, 16\)"),
        ({"depht": 3}, "depht.*did you mean depth"),
        ({"name": "swin_tiny_w7"}, "holds a vit.*which swin_tiny_w7 is not"),
        ({"name": "vit_tinny_p16"}, "holds a vit.*which vit_tinny_p16 is not"),
        ({"network": "both"}, "network='both': choose teacher or student"),
        ({"allow_partial": ["block.*"]}, "matches no key"),
    ],
)
def test_overrides_that_do_not_fit_are_refused(options, message, tmp_path):
    torch.save(ours("vit_tiny_p16").state_dict(), tmp_path / "a.pth")
    with pytest.raises(ValueError, match=message):
        backbones.load(tmp_path / "a.pth", **options)


def test_a_partial_load_is_allowed_by_name(tmp_path):
    torch.save(ours("vit_tiny_p16").state_dict(), tmp_path / "a.pth")
    backbone, report = backbones.load(tmp_path / "a.pth", depth=3, allow_partial=["blocks.2.*"])
    assert len(report.missing) == 12
    assert len(backbone.blocks) == 3


@pytest.mark.parametrize(
    "keys", [["conv1.weight", "layer1.0.conv1.weight", "fc.bias"], ["blocks.0.norm1.weight"]]
)
def test_an_unknown_layout_is_refused_with_what_was_found_and_what_is_known(keys, tmp_path):
    torch.save({key: torch.zeros(1) for key in keys}, tmp_path / "resnet.pth")
    with pytest.raises(
        ValueError, match=rf"resnet\.pth is in no known layout: its keys are {keys[0]}.*known are DINO"
    ):
        backbones.load(tmp_path / "resnet.pth")


def test_a_backbone_comes_in_evaluation_mode_and_reads_keep_their_tensors(tmp_path):
    network = ours()
    torch.save(network.state_dict(), tmp_path / "a.pth")
    assert not backbones.load(tmp_path / "a.pth").backbone.training
    weights = read(tmp_path / "a.pth")
    assert (weights.name, weights.layout, weights.network) == ("xcit_tiny_12_p16", "XCiT", None)
    for key, value in network.state_dict().items():
        assert torch.equal(weights.tensors[key], value)
