"""Results: where they go, what they say, and that nothing of other settings is lost."""

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

import pytest

from nestling import backbones
from nestling.ssl.config import Backbone, Config
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.results import results_file, run_of, show_table, write_results
from nestling.ssl.evaluation.settings import EvalData, Evaluation, override
from nestling.ssl.trained import Trained

OPTIONS = {"embed_dim": 16, "depth": 1, "num_heads": 2}


@dataclass
class Settings(Evaluation):
    sizes: list[int] = field(default_factory=lambda: [32])


@pytest.fixture
def trained(tmp_path):
    checkpoint = tmp_path / "run/checkpoints/step_00000007"
    checkpoint.mkdir(parents=True)
    file = checkpoint / "teacher.safetensors"
    file.write_bytes(b"weights")
    backbone = backbones.create("xcit_nano_12_p4", **OPTIONS)
    config = Config(backbone=Backbone("xcit_nano_12_p4", 0.1, OPTIONS))
    return Trained(backbone, config, file, checkpoint, "teacher", 7)


def test_results_go_to_the_run_with_all_that_repeats_them(trained, tmp_path, capsys):
    settings = Settings(checkpoint="run")
    path = results_file(trained, "knn", settings)
    assert path == tmp_path / "run/results/knn_step_00000007_teacher.json"
    assert not path.exists()
    override(trained.config, "data", EvalData(val="mine"))
    write_results(path, trained, settings, {"top1": 0.5}, num_train=3)
    found = json.loads(path.read_text())
    assert found["results"] == {"top1": 0.5}
    assert (found["num_train"], found["network"], found["step"]) == (3, "teacher", 7)
    assert found["settings"]["sizes"] == [32]
    assert found["weights"] == str(trained.file)
    assert found["sha256"] == hashlib.sha256(b"weights").hexdigest()
    assert (found["backbone"], found["options"]) == ("xcit_nano_12_p4", OPTIONS)
    assert found["command"]
    assert (found["cwd"], found["num_processes"]) == (str(Path.cwd()), 1)
    again = Config(seed=found["config"].pop("seed"))
    for section, said in found["config"].items():
        setattr(again, section, replace(getattr(Config(), section), **said))
    used = {name: getattr(trained.config, name) for name in ("data", "knn", "views", "seed")}
    assert json.loads(json.dumps(asdict(again))) == json.loads(json.dumps(asdict(Config(**used))))
    assert found["config"]["data"]["val"] == "mine"
    assert found["environment"]["packages"]["torch"] == version("torch")
    assert f"written to {path}" in capsys.readouterr().out.replace("\n", "")


def test_the_same_settings_replace_their_results_and_others_get_a_number(trained):
    first, other = Settings("run"), Settings("run", sizes=[64])
    path = results_file(trained, "knn", first)
    write_results(path, trained, first, {"top1": 0.5})
    second = results_file(trained, "knn", other)
    assert second.name == "knn_step_00000007_teacher_2.json"
    write_results(second, trained, other, {"top1": 0.6})
    assert results_file(trained, "knn", first) == path
    assert results_file(trained, "knn", other) == second
    assert results_file(trained, "knn", Settings("run", sizes=[96])).name.endswith("_3.json")
    assert results_file(trained, "linear", first).name == "linear_step_00000007_teacher.json"
    path.write_text("damaged")  # is nobody's, and stays
    assert results_file(trained, "knn", first).name.endswith("_3.json")


def test_a_weights_file_and_a_copied_checkpoint_keep_their_results_beside_them(trained, tmp_path):
    alone = Trained(trained.backbone, trained.config, tmp_path / "w.pth", None, None, None)
    assert results_file(alone, "knn", Settings("w.pth")) == tmp_path / "results/knn_w.json"
    assert alone.title == f"backbone of {tmp_path}/w.pth"
    assert run_of(Path("a/copy")) == Path("a/copy")
    assert run_of(Path("run/checkpoints/step_1")) == Path("run")


def test_a_place_that_cannot_be_written_is_refused(trained, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match=r"out=.*file/knn\.json can't be written"):
        results_file(trained, "knn", Settings("run"), str(tmp_path / "file/knn.json"))
    for name in ("masks", "classes.csv"):
        with pytest.raises(UserError, match=rf"out={name} names the file of the results: end it in \.json"):
            results_file(trained, "knn", Settings("run"), name)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert results_file(trained, "knn", Settings("run"), "~/knn.json") == tmp_path / "knn.json"


def test_a_table_shows_shares_in_percent_and_the_rest_as_it_is(capsys):
    long = f"accuracy of {'a/long/path/' * 20}[/b]"
    show_table(long, ["[bold]", "k", "top-1 %"], [("[/car]", 20, 0.12345), ("[sky]\\", 10, 1.0)])
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == long
    head = [cell.strip() for cell in lines[1].split("┃")[1:-1]]
    assert head == ["[bold]", "k", "top-1 %"]
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert cells == [["[/car]", "20", "12.3"], ["[sky]\\", "10", "100.0"]]


def test_what_is_given_overrides_the_run_and_only_that():
    config = Config()
    config.data.val, config.data.num_workers = "as/the/run", 3
    override(config, "data", EvalData(train="mine", num_workers=0))
    assert (config.data.train, config.data.val, config.data.num_workers) == ("mine", "as/the/run", 0)
