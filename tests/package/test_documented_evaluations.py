"""The dense evaluations, and fine-tuning, as README and docs show them."""

import importlib
import json
import shlex
from pathlib import Path

import pytest
from dense_subjects import write_all, write_tiny_run
from documented import DENSE, DETECTION, FINETUNE, ROOT

from nestling.ssl.command_line import read
from nestling.ssl.evaluation.detection.settings import FineTuneDetection
from nestling.ssl.evaluation.finetuning.settings import FineTune


@pytest.mark.parametrize("command", [*FINETUNE, *DETECTION])
def test_a_recipe_for_fine_tuning_takes_what_is_documented(command):
    """tests/recipes/test_finetune.py, test_finetune_detection.py and .ci/smoke run them whole."""
    script, *arguments = shlex.split(command.partition("recipes/")[2])
    assert (ROOT / "recipes" / script).is_file()
    schema = FineTune if command in FINETUNE else FineTuneDetection
    config = read(schema, arguments, program="recipe", positional=("checkpoint",))
    assert f"data.val={config.data.val}" in arguments


@pytest.fixture(scope="module")
def data_sets(tmp_path_factory) -> Path:
    """A tiny run, and what the pages on dense evaluations and retrieval name, beside each other."""
    folder = write_all(tmp_path_factory.mktemp("dense"))
    write_tiny_run(folder / "runs/pretrain")
    return folder


@pytest.mark.parametrize(("command", "small"), DENSE)
def test_a_documented_dense_evaluation_writes_its_results(command, small, data_sets, monkeypatch):
    """In this process, as starting one takes longer than the work."""
    monkeypatch.chdir(data_sets)
    _, script, *arguments = shlex.split(command)
    given = {argument.partition("=")[0] for argument in arguments}
    more = [argument for argument in small.split() if argument.partition("=")[0] not in given]
    out = data_sets / "found.json"
    importlib.import_module(f"nestling.recipes.{Path(script).stem}").main([*arguments, *more, f"out={out}"])
    results = json.loads(out.read_text())["results"]
    out.unlink()
    assert results
    assert all(0 <= value <= 1 for value in results.values())
