"""What export takes, where it writes, and mistakes in one sentence.

tests/package/test_documented_commands.py starts it for every target, as a user does.
"""

import json

import pytest
import torch
from export_subjects import write_run

from nestling import backbones
from nestling.recipes.export import main
from nestling.ssl.errors import UserError
from nestling.ssl.run.loading import load_backbone


def test_the_checkpoint_network_and_place_are_as_given(tmp_path, capsys):
    checkpoint = write_run(tmp_path / "run", "xcit") / "checkpoints/step_00000007"
    out = tmp_path / "new/export"
    main([str(checkpoint), "--to=nestling", "network=student", f"out={out}"])
    student, _ = load_backbone(checkpoint, "student")
    loaded = backbones.load(out).backbone.state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in student.state_dict().items())
    assert json.loads((out / "export.json").read_text())["network"] == "student"
    assert f"written to {out}" in capsys.readouterr().out
    assert not (checkpoint / "export_nestling").exists()


def test_a_run_of_a_users_own_network_is_exported(tmp_path, capsys):
    checkpoint = write_run(tmp_path / "run", "custom") / "checkpoints/step_00000007"
    main([str(checkpoint), "--to", "nestling"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"teacher of {checkpoint}, export_subjects:Patches, to nestling"
    assert printed[1] == "largest difference at 64 x 64 pixels: 0"


def test_to_may_be_written_as_any_other_key(tmp_path):
    run = write_run(tmp_path / "run", "xcit")
    main([str(run), "to=nestling"])
    with pytest.raises(UserError, match="overwrite=true replaces it"):
        main([str(run), "--to", "nestling"])
    main([str(run), "--to", "nestling", "overwrite=true"])
    assert (run / "checkpoints/step_00000007/export_nestling/export.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN"], r"to is missing; add --to NAME"),
        (["RUN", "--to"], r"--to needs one of nestling, timm, hf, onnx, torch_export, as in --to nestling"),
        (["RUN", "--to", "network=student"], r"--to needs one of nestling"),
        (["RUN", "--to", "tim"], r"to=tim is not one of .*did you mean timm\?"),
        (["RUN", "--to", "timm", "to=onnx"], r"to is given twice: to=timm and to=onnx"),
        (["RUN", "--too", "timm"], r"unknown option --too; did you mean --to\?"),
        (["--to", "timm"], r"checkpoint is missing; add CHECKPOINT"),
        (["RUN/nothing", "--to", "timm"], r"nothing: no such folder"),
        (["RUN", "--to", "timm", "network=both"], r"network=both"),
        (["RUN", "--to", "hf"], r"--to hf: xcit_nano_12_p16 is an XCiT"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, arguments, message):
    run = write_run(tmp_path / "run", "xcit")
    with pytest.raises(UserError, match=message):
        main([argument.replace("RUN", str(run)) for argument in arguments])


def test_help_shows_the_option_and_the_keys(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    assert "usage: recipes/export.py CHECKPOINT --to NAME" in printed
    for name in ("checkpoint", "to", "network", "out", "overwrite"):
        assert f"\n  {name}=" in printed
