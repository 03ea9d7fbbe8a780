"""From a checkpoint folder to its backbone: found, strict, and refused in one sentence."""

import pytest
import torch
from safetensors.torch import save_file

from nestling import backbones
from nestling.ssl.command_line import write
from nestling.ssl.config import Backbone, Config
from nestling.ssl.errors import UserError
from nestling.ssl.run.loading import check_size, find_checkpoint, load_backbone, saved_step

OPTIONS = {"embed_dim": 16, "depth": 1, "num_heads": 2}


def write_checkpoint(folder, change=lambda tensors: tensors, name="xcit_nano_12_p4"):
    folder.mkdir(parents=True)
    for seed, network in enumerate(("teacher", "student")):
        torch.manual_seed(seed)
        state = backbones.create("xcit_nano_12_p4", **OPTIONS).state_dict()
        tensors = {f"backbone.{key}": value for key, value in state.items()} | {"head.weight": torch.ones(2)}
        save_file(change(tensors), folder / f"{network}.safetensors")
    write(Config(backbone=Backbone(name, 0.1, OPTIONS)), folder / "config.yaml")
    (folder / "trainer.json").write_text('{"step": 7}')
    return folder


def test_the_network_asked_for_comes_back_with_its_weights_and_config(tmp_path):
    folder = write_checkpoint(tmp_path / "step_00000007")
    for seed, network in enumerate(("teacher", "student")):
        backbone, config = load_backbone(folder, network)
        torch.manual_seed(seed)
        for key, value in backbones.create("xcit_nano_12_p4", **OPTIONS).state_dict().items():
            assert torch.equal(backbone.state_dict()[key], value), key
        assert not backbone.training
        assert config.backbone.options == OPTIONS
    assert saved_step(folder) == 7


def test_a_run_stands_for_its_best_checkpoint_else_its_newest(tmp_path):
    for step in (9, 10):
        write_checkpoint(tmp_path / f"checkpoints/step_{step:08d}")
    assert find_checkpoint(tmp_path).name == "step_00000010"
    (tmp_path / "best").write_text("checkpoints/step_00000009\n")
    assert find_checkpoint(tmp_path).name == "step_00000009"
    assert find_checkpoint(tmp_path / "checkpoints/step_00000010").name == "step_00000010"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: {"head.weight": torch.ones(2)}, r"keys missing, such as"),
        (lambda tensors: tensors | {"backbone.more": torch.ones(1)}, r"1 keys unexpected, such as more"),
        (
            lambda tensors: tensors | {"backbone.cls_token": torch.ones(1)},
            r"of another shape, such as cls_token",
        ),
        (
            lambda tensors: {key.replace("backbone.", "module.backbone."): v for key, v in tensors.items()},
            r"keys missing",
        ),
    ],
)
def test_weights_that_do_not_fit_exactly_are_refused(tmp_path, change, message):
    folder = write_checkpoint(tmp_path / "step_00000001", change)
    with pytest.raises(UserError, match=message):
        load_backbone(folder)


def test_what_is_missing_or_damaged_is_named(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        find_checkpoint(tmp_path / "nothing")
    with pytest.raises(UserError, match="holds no checkpoint"):
        find_checkpoint(tmp_path)
    folder = write_checkpoint(tmp_path / "step_00000001")
    with pytest.raises(UserError, match="network=both"):
        load_backbone(folder, "both")
    (folder / "teacher.safetensors").write_bytes(b"not tensors")
    with pytest.raises(UserError, match=r"teacher\.safetensors cannot be read"):
        load_backbone(folder)
    (folder / "student.safetensors").unlink()
    with pytest.raises(UserError, match=r"student\.safetensors: no such file"):
        load_backbone(folder, "student")
    (folder / "config.yaml").unlink()
    with pytest.raises(UserError, match=r"config\.yaml: no such file"):
        load_backbone(folder)


def test_a_size_that_the_backbone_cannot_take_is_refused_by_its_key():
    backbone = backbones.create("xcit_nano_12_p8", **OPTIONS)
    check_size(backbone, 32, "knn.size")
    with pytest.raises(UserError, match=r"^knn\.size=7: .* 8 x 8"):
        check_size(backbone, 7, "knn.size")
