import pytest
import torch

from nestling.ssl.config import Config
from nestling.ssl.errors import UserError
from nestling.ssl.run import directory, lock
from nestling.ssl.views import render


def config(out, **settings) -> Config:
    return Config(out=str(out), **settings)


def write_run(folder) -> None:
    (folder / "checkpoints" / "step_00000001").mkdir(parents=True)
    (folder / "config.yaml").write_text("seed: 0\n")
    directory.write_json(folder / "environment.json", directory.environment())


def test_a_new_or_empty_folder_is_claimed(tmp_path):
    assert directory.claim(config(tmp_path / "new" / "run")) is None
    lock.let_go()
    assert directory.claim(config(tmp_path / "new" / "run")) is None
    assert (tmp_path / "new" / "run").is_dir()


def test_a_run_is_not_overwritten_unasked(tmp_path):
    write_run(tmp_path)
    with pytest.raises(UserError, match=r"resume=auto.*overwrite=true"):
        directory.claim(config(tmp_path))
    assert (tmp_path / "config.yaml").exists()


def test_overwrite_deletes_what_a_run_writes_and_nothing_else(tmp_path):
    write_run(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "nonfinite" / "checkpoints").mkdir(parents=True)
    with lock.let_go_at_the_end():
        directory.claim(config(tmp_path, overwrite=True))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("settings", [{}, {"overwrite": True}, {"resume": "auto"}])
def test_a_folder_with_a_config_of_another_program_is_no_run(tmp_path, settings):
    (tmp_path / "config.yaml").write_text("theirs: true\n")
    with pytest.raises(UserError, match="no run of nestling"):
        directory.claim(config(tmp_path, **settings))
    assert (tmp_path / "config.yaml").read_text() == "theirs: true\n"


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"out=.*file/run can't be used: Not a directory"):
        directory.claim(config(tmp_path / "file" / "run"))


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(UserError, match="is a file"):
        directory.claim(config(tmp_path / "out"))


def test_a_changed_setting_is_named_with_both_values():
    with pytest.raises(UserError, match=r"optim\.lr=0\.1, now it is 0\.2"):
        directory.refuse_changes({"optim.lr": 0.1, "seed": 0}, {"optim.lr": 0.2, "seed": 0}, "runs/x")


def test_where_it_runs_and_what_it_logs_may_change():
    directory.refuse_changes(
        {"log.every": 1, "data.num_workers": 0}, {"log.every": 5, "data.num_workers": 4}, "runs/x"
    )


def test_which_checkpoints_stay_and_what_a_full_disk_means_may_change():
    old = {"train.keep_last": 2, "train.keep_every": 0, "train.on_full_disk": "stop"}
    new = {"train.keep_last": 1, "train.keep_every": 5, "train.on_full_disk": "wait"}
    directory.refuse_changes(old, new, "runs/x")


def test_the_environment_names_versions_and_revision():
    record = directory.environment()
    assert record["packages"]["torch"].count(".") >= 2
    assert record["nestling"] is None or record["nestling"][0].isdigit()
    assert set(record) >= {"python", "platform", "git", "git_dirty"}
    assert {"torchmetrics", "pycocotools"} <= set(record["packages"])
    assert (record["device"], record["threads"]) == (directory.processor(), torch.get_num_threads())
    assert record["compiled_kernel"] == (render.kernel is not None)
