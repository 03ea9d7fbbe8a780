"""From any path to a backbone that is ready to be judged: runs, exports, foreign files, and damaged ones."""

import hashlib
import json

import pytest
import torch
from export_subjects import MEAN, SIDE, SMALL, STD, network_state, small, write_run
from safetensors.torch import load_file, save_file

from nestling import backbones
from nestling.ssl.data.channels import normalisation
from nestling.ssl.errors import UserError
from nestling.ssl.export.own import Own
from nestling.ssl.trained import file_sha256, load_trained, weights_sha256


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("trained") / "run", "vit")


def same(backbone, family, seed):
    expected = {
        key.removeprefix("backbone."): value
        for key, value in network_state(family, seed).items()
        if key.startswith("backbone.")
    }
    found = backbone.state_dict()
    return found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)


def is_ready(backbone):
    return not backbone.training and all(
        not weight.requires_grad and weight.dtype == torch.float32 for weight in backbone.parameters()
    )


@pytest.mark.parametrize(("network", "seed"), [("teacher", 0), ("student", 1)])
def test_a_run_and_its_checkpoint_are_the_backbone_with_the_runs_own_settings(run, network, seed):
    for path in (run, run / "checkpoints/step_00000007"):
        trained = load_trained(path, network)
        assert same(trained.backbone, "vit", seed)
        assert is_ready(trained.backbone)
        assert trained.checkpoint == run / "checkpoints/step_00000007"
        assert trained.file == trained.checkpoint / f"{network}.safetensors"
        assert (trained.network, trained.step, trained.size) == (network, 7, SIDE)
        assert normalisation(trained.config.data) == (MEAN, STD)
        assert trained.title == f"{network} of {trained.checkpoint}"
        facts = trained.facts()
        assert facts["sha256"] == hashlib.sha256(trained.file.read_bytes()).hexdigest()
        assert (facts["backbone"], facts["options"]) == (SMALL["vit"][0], SMALL["vit"][1])
        json.dumps(facts)


def test_an_export_of_ours_brings_its_images_settings_but_no_images(tmp_path):
    subject = small("xcit")
    Own().write(subject, tmp_path)
    trained = load_trained(tmp_path / "model.safetensors")
    images = torch.randn(2, 3, 48, 32)
    assert torch.equal(trained.backbone(images).cls, subject.backbone.eval()(images).cls)
    assert is_ready(trained.backbone)
    assert (trained.checkpoint, trained.step, trained.size) == (None, None, SIDE)
    assert normalisation(trained.config.data) == (MEAN, STD)
    assert trained.config.knn.crop_ratio == 0.875
    assert trained.config.data.train == ""
    assert trained.title.endswith(f"of {tmp_path}/model.safetensors")
    assert load_trained(tmp_path).file == trained.file, "its folder stands for it"


@pytest.mark.parametrize("network", ["teacher", "student"])
def test_a_foreign_dino_file_is_judged_as_imagenet_is(network, tmp_path):
    options = {"depth": 2}
    torch.manual_seed(0)
    states = {
        name: backbones.create("vit_tiny_p16", **options).state_dict() for name in ("teacher", "student")
    }
    foreign = {
        name: {f"backbone.{key}": value for key, value in state.items()} for name, state in states.items()
    }
    torch.save({**foreign, "epoch": 3}, tmp_path / "dino.pth")
    trained = load_trained(tmp_path / "dino.pth", network)
    found = trained.backbone.state_dict()
    assert all(torch.equal(found[key], value) for key, value in states[network].items())
    assert trained.network == network
    assert (trained.size, trained.config.data.in_chans) == (224, None)
    assert trained.facts()["options"]["depth"] == 2


@pytest.mark.parametrize(
    ("in_chans", "mode", "said"), [(1, "gray", None), (3, "rgb", None), (5, "unchanged", 5)]
)
def test_images_have_the_channels_that_the_weights_take(in_chans, mode, said, tmp_path):
    subject = small("vit", **({} if in_chans == 3 else {"in_chans": in_chans}))
    Own().write(subject, tmp_path)
    trained = load_trained(tmp_path / "model.safetensors")
    assert (trained.config.data.mode, trained.config.data.in_chans) == (mode, said)
    assert trained.facts()["options"].get("in_chans", 3) == in_chans
    assert trained.backbone(torch.randn(1, in_chans, 32, 32)).cls.shape == (1, 32)


def test_what_is_no_trained_network_is_refused_in_one_sentence(run, tmp_path):
    good = run / "checkpoints/step_00000007/teacher.safetensors"
    (tmp_path / "cut.safetensors").write_bytes(good.read_bytes()[:-100])
    (tmp_path / "text.pth").write_text("no weights")
    save_file({"a": torch.ones(2)}, tmp_path / "other.safetensors")
    (tmp_path / "empty").mkdir()
    for path in ("cut.safetensors", "text.pth", "other.safetensors", "gone.pth", "empty"):
        with pytest.raises(UserError) as refusal:
            load_trained(tmp_path / path)
        assert path in str(refusal.value)
        assert "\n" not in str(refusal.value)
    assert load_file(good)


def test_the_hash_is_of_the_file_or_the_files_of_a_folder(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * (1 << 20) + b"y")
    assert file_sha256(tmp_path / "a") == hashlib.sha256(b"x" * (1 << 20) + b"y").hexdigest()
    assert file_sha256(tmp_path) is None
    of_folder = weights_sha256(tmp_path)
    assert of_folder != weights_sha256(tmp_path / "a")
    (tmp_path / "a").write_bytes(b"other weights")
    assert weights_sha256(tmp_path) != of_folder
