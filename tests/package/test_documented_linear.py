"""docs/linear.md: its commands run, and so does its Python."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from small_probe import write_probe

from nestling.recipes.eval_linear import main
from nestling.ssl.evaluation.linear.settings import Linear
from nestling.ssl.keys import keys_of

PAGE = (Path(__file__).parents[2] / "docs" / "linear.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^(?:python|accelerate launch) recipes/eval_linear\.py (.*)$", PAGE, re.MULTILINE)


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    (tmp_path / "runs").mkdir()
    write_probe(tmp_path).rename(tmp_path / "runs/pretrain")
    step = tmp_path / "runs/pretrain/checkpoints"
    (step / "step_00000007").rename(step / "step_00001000")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_commands_and_the_python_of_the_page_run(place):
    for command in COMMANDS:
        arguments = shlex.split(command.replace("/images/val", str(place / "val")))
        shrunk = "linear.c=[1]" if "protocol=logreg" in command else "linear.epochs=1"
        main([*arguments, shrunk])
    assert len(COMMANDS) == len(list((place / "runs/pretrain/results").glob("*.json"))) == 4
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    *lines, last = block.strip().splitlines()
    names = {"images": torch.rand(2, 3, 16, 16)}
    exec("\n".join(lines), names)
    assert eval(last, names) in {f"class_{kind}" for kind in range(6)}


def test_the_keys_that_the_page_names_exist():
    assert set(re.findall(r"linear\.(\w+)", PAGE)) - {"saved"} <= set(keys_of(Linear)) | {"py"}
