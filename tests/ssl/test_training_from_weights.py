"""Runs that start from weights, with `init_from`."""

import shutil
from pathlib import Path

import pytest
import torch
from small_runs import assert_same, config, trained

from nestling import backbones
from nestling.ssl.errors import UserError
from nestling.ssl.pretraining import pretrain
from nestling.ssl.run import checkpoints
from nestling.ssl.run.log import read

pytestmark = pytest.mark.usefixtures("own_backbones")


def test_a_run_that_starts_from_weights_leaves_them_alone_while_its_head_warms_up(image_folder, tmp_path):
    settings = config(image_folder(per_class=12, size=20), tmp_path / "run", name="xcit_nano_12_p4", epochs=2)
    settings.optim.warmup_epochs = settings.teacher.temperature_warmup_epochs = 1
    settings.backbone.options["tokens_norm"] = True
    settings.backbone.freeze_epochs = 1
    settings.init_from = str(tmp_path / "weights.pth")
    torch.manual_seed(5)
    initial = backbones.create("xcit_nano_12_p4", **settings.backbone.options)
    torch.save(initial.state_dict(), settings.init_from)
    pretrain(settings)
    frozen, free = (checkpoints.load(path) for path in checkpoints.saved(tmp_path / "run"))
    for name, parameter in initial.named_parameters():
        for network in (frozen.student, frozen.teacher):
            assert torch.equal(network[f"backbone.{name}"], parameter), name
    assert not torch.equal(free.student["backbone.cls_token"], initial.cls_token)
    assert not torch.equal(frozen.student["head.mlp.0.weight"], free.student["head.mlp.0.weight"])
    assert [record["backbone_frozen"] for record in read(tmp_path / "run" / "log.jsonl")[1:]] == [
        True
    ] * 3 + [False] * 3


def test_a_run_that_started_from_weights_goes_on_without_their_file(image_folder, tmp_path):
    settings = config(
        image_folder(per_class=12, size=20), tmp_path / "run", name="xcit_nano_12_p4", keep_last=9
    )
    settings.backbone.options = {"tokens_norm": True}
    settings.init_from = str(tmp_path / "weights.pth")
    network = backbones.create("xcit_nano_12_p4", embed_dim=16, depth=1, num_heads=2)
    torch.save(network.state_dict(), settings.init_from)
    whole, _ = trained(settings)
    for checkpoint in checkpoints.saved(tmp_path / "run")[1:]:
        shutil.rmtree(checkpoint)
    Path(settings.init_from).unlink()
    settings.resume = "auto"
    resumed, _ = trained(settings)
    assert_same(whole.student, resumed.student)
    assert_same(whole.teacher, resumed.teacher)


def test_weights_that_do_not_fit_are_refused_before_an_old_run_is_deleted(image_folder, tmp_path):
    settings = config(image_folder(per_class=12, size=20), tmp_path / "run", name="xcit_nano_12_p4")
    settings.backbone.options["tokens_norm"] = True
    old = pretrain(settings) / "log.jsonl"
    text = old.read_text()
    settings.overwrite = True
    settings.init_from = str(tmp_path / "weights.pth")
    torch.save(
        backbones.create("xcit_nano_12_p4", embed_dim=32, depth=1, num_heads=2).state_dict(),
        settings.init_from,
    )
    with pytest.raises(UserError, match=r"init_from=.* do not fit xcit_nano_12_p4"):
        pretrain(settings)
    assert old.read_text() == text
