"""Room for checkpoints: estimated from the tensors, asked for before the first step."""

import errno

import pytest
import torch
from config_observers import run as pretrained
from full_disks import files_of_at_most
from image_folder import write_image_folder
from safetensors import SafetensorError
from safetensors.torch import save_file
from small_checkpoint import small_run as config

from nestling.ssl.distillation import SelfDistillation
from nestling.ssl.errors import UserError
from nestling.ssl.run import checkpoints, disk


@pytest.mark.parametrize("name", disk.MOMENTS)
def test_the_size_of_a_checkpoint_is_known_before_the_first_step(tmp_path, name):
    write_image_folder(tmp_path / "images", classes=2, per_class=8, size=20)
    settings = config(tmp_path / "run", epochs=1)
    settings.optim.name, settings.head.num_prototypes = name, 20_000
    settings.head.freeze_epochs = 0  # a frozen layer has no moments yet
    estimated = disk.checkpoint_bytes(SelfDistillation(settings), name)
    pretrained(settings)
    newest = checkpoints.newest(tmp_path / "run")
    written = sum(file.stat().st_size for file in newest.iterdir())
    assert estimated == pytest.approx(written, rel=0.05)
    assert estimated == pytest.approx(checkpoints.load(newest).num_bytes(), rel=1e-3)


def test_a_disk_too_small_for_two_checkpoints_is_refused_with_both_numbers(tmp_path):
    settings = config(tmp_path / "run")
    with torch.device("meta"):  # so large that no disk holds it
        settings.head.num_prototypes = 10**15
        huge = SelfDistillation(settings)
    with pytest.raises(
        UserError, match=r"run: the disk has [\d.]+ .B free and two .* take [\d.e+]+ TB; make"
    ):
        disk.refuse_small(settings, huge)
    assert not (tmp_path / "run").exists()
    disk.refuse_small(settings, SelfDistillation(config(tmp_path / "run")))


def test_what_is_overwritten_counts_as_free_and_a_run_that_goes_on_is_not_asked(tmp_path):
    settings = config(tmp_path / "run")
    with torch.device("meta"):
        settings.head.num_prototypes = 10**10
        huge = SelfDistillation(settings)
    old = tmp_path / "run/checkpoints/step_00000001/student.safetensors"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"weights")
    disk.refuse_small(settings, huge)
    settings.overwrite = True
    with pytest.raises(UserError, match="two checkpoints of this run take"):
        disk.refuse_small(settings, huge)
    with old.open("ab") as file:
        file.truncate(2**43)  # sparse: it takes no room itself
    disk.refuse_small(settings, huge)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1200, "1.2 kB"), (3.25e9, "3.25 GB"), (5e13, "50 TB")],
)
def test_sizes_are_said_for_people(num_bytes, text):
    assert disk.size(num_bytes) == text


def save_tensors(path):
    save_file({"a": torch.zeros(10_000)}, path)


def save_pickled(path):
    with path.open("wb") as file:
        torch.save({"a": torch.zeros(10_000)}, file)


@pytest.mark.parametrize("write", [save_tensors, save_pickled, lambda path: path.write_bytes(bytes(40_000))])
def test_every_library_tells_that_there_is_no_room(tmp_path, write):
    with files_of_at_most(5000), pytest.raises((OSError, RuntimeError, SafetensorError)) as caught:
        write(tmp_path / "file")
    assert disk.reason(caught.value) == errno.EFBIG
    assert disk.reason(ValueError("of its own")) is None


def half_write(path):
    path.write_text("half")
    torch.zeros(2) @ torch.zeros(3)  # fails, but not for the disk


@pytest.mark.parametrize("write", [save_tensors, save_pickled, lambda path: path.write_bytes(bytes(40_000))])
def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, write):
    path = tmp_path / "config.yaml"
    path.write_text("old")
    with (
        files_of_at_most(5000),
        pytest.raises(UserError, match=r"config\.yaml can't be written: File too large"),
        disk.replaced(path) as draft,
    ):
        write(draft)
    with pytest.raises(RuntimeError, match="inconsistent tensor size"), disk.replaced(path) as draft:
        half_write(draft)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("config.yaml", "old")]
    with disk.replaced(path) as draft:
        draft.write_text("new")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("config.yaml", "new")]
