"""What is said when memory runs out, and how much there is."""

import errno
from pathlib import Path

import numpy as np
import pytest
import torch

from nestling.ssl import allocator
from nestling.ssl.config import Config
from nestling.ssl.errors import UserError
from nestling.ssl.run import memory
from nestling.ssl.run.memory import (
    IN_EVALUATION,
    IN_TRAINING,
    cgroup_rooms,
    running_out_explained,
    running_out_named,
)


def too_much() -> None:
    torch.empty(2**61, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("happens", "is_memory"),
    [
        (too_much, True),
        (lambda: np.empty(2**61, np.uint8), True),
        (lambda: bytearray(2**62), True),
        (lambda: torch.ones(2) @ torch.ones(3), False),
        (lambda: Path("/nowhere").read_text(), False),
    ],
)
def test_errors_that_mean_memory_are_told_from_others(happens, is_memory):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        happens()
    assert memory.is_out_of_memory(caught.value) == is_memory


def test_a_system_that_refuses_memory_is_understood_too():
    assert memory.is_out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert memory.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))


def said(config: Config, phase: str) -> str:
    with pytest.raises(UserError) as caught, running_out_explained(config, phase):
        too_much()
    return str(caught.value)


def test_what_to_lower_in_training_is_named_with_the_numbers_of_the_config():
    config = Config()
    config.train.batch_size, config.train.accumulation, config.train.precision = 48, 2, "fp32"
    text = said(config, IN_TRAINING)
    assert "memory ran out in training (it asked for 2.31e+06 TB more)" in text
    assert "train.batch_size=24 train.accumulation=4 in the place of 48 and 2 (the same global batch)" in text
    for part in ("train.activation_checkpointing=true", "views.num_local=8", "train.precision=bf16"):
        assert part in text
    config.train.batch_size, config.train.activation_checkpointing = 9, True
    config.train.precision, config.views.num_local = "bf16", 0
    text = said(config, IN_TRAINING)
    assert "train.batch_size=3 train.accumulation=6 in" in text
    assert not any(word in text for word in ("activation_checkpointing", "num_local", "precision"))
    config.train.batch_size = 1
    assert "lower views.global_size=[224] also helps" in said(config, IN_TRAINING)


def test_in_evaluation_other_keys_help():
    config = Config()
    assert "in evaluation" in said(config, IN_EVALUATION)
    assert said(config, IN_EVALUATION).endswith("give knn.batch_size=64 or a knn.size below 224")
    config.knn.batch_size, config.knn.size = 1, 96
    assert said(config, IN_EVALUATION).endswith("give a knn.size below 96")


@pytest.mark.parametrize(
    ("numbers", "advice"),
    [({"size": 8, "batch_size": 3}, "give size=4 or batch_size=1, smaller"), ({"n": 1}, "give smaller")],
)
def test_a_recipe_names_the_keys_of_its_own_that_can_be_lower(numbers, advice):
    message = rf"^memory ran out \(it asked for 2\.31e\+06 TB more\): {advice} images or a smaller network$"
    with pytest.raises(UserError, match=message), running_out_named(numbers):
        too_much()
    with pytest.raises(KeyError), running_out_named(numbers):
        raise KeyError


def test_a_container_and_those_around_it_limit_the_room(tmp_path):
    def group(place: str, most: str, used: int, files: int) -> None:
        folder = tmp_path / place
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {files}\nactive_file 7\n")

    group("job", "1000", 700, 100)
    group("job/step", "max", 600, 0)
    group("other", "10", 9, 0)
    names = ("memory.max", "memory.current", "inactive_file")
    assert cgroup_rooms(tmp_path, "0::/job/step\n", *names) == [400]
    group("job/step", "650", 600, 0)
    assert sorted(cgroup_rooms(tmp_path, "4:cpu,memory:/job/step\n9:cpu:/other\n", *names)) == [50, 400]
    group("", "2000", 1000, 0)
    assert cgroup_rooms(tmp_path, "0::/not/seen/from/within\n", *names) == [1000]


def test_the_peak_of_what_a_process_held_is_read_and_forgotten():
    allocator.give_back()
    memory.forget_peak()
    before = memory.status("VmHWM")
    torch.ones(100 * 2**20, dtype=torch.uint8)
    assert memory.status("VmHWM") >= before + 90 * 2**20
    memory.forget_peak()
    assert memory.status("VmHWM") < before + 50 * 2**20
    room = memory.room()
    assert room is not None
    assert 0 < room < 2**50
