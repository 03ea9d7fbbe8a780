import math

import pytest
import torch

from nestling.ssl.monitors import CollapseMonitor, Throughput, Window

HEALTHY = {"dino/teacher_entropy": 0.6, "dino/kl": 0.5, "dino/dominant_prototype": 0.05, "feature_std": 0.8}
YOUNG = {"dino/teacher_entropy": 0.9999, "dino/kl": 1e-4, "dino/dominant_prototype": 0.3, "feature_std": 0.5}
SAME = {"dino/teacher_entropy": 0.001, "dino/kl": 1e-3, "dino/dominant_prototype": 1.0, "feature_std": 0.001}


def warnings(states: list[tuple[int, dict[str, float]]]) -> list[tuple[int, str]]:
    monitor = CollapseMonitor(patience=100)
    return [(step, text) for step, state in states for text in monitor.check(step, state)]


def test_a_healthy_run_stays_silent():
    assert warnings([(step, HEALTHY) for step in range(0, 5000, 10)]) == []


def test_a_young_run_with_nearly_uniform_targets_stays_silent():
    assert warnings([(step, YOUNG if step < 90 else HEALTHY) for step in range(0, 1000, 10)]) == []


def test_a_uniform_teacher_is_said_once_with_the_knobs_that_help():
    said = warnings([(step, YOUNG) for step in range(0, 1000, 10)])
    assert [step for step, _ in said] == [100]
    assert "uniform" in said[0][1]
    assert "teacher.temperature" in said[0][1]
    assert "optim.lr" in said[0][1]


def test_one_prototype_for_all_is_said_once_and_again_when_it_comes_back():
    phases = [(step, SAME if step < 300 or step >= 600 else HEALTHY) for step in range(0, 1000, 10)]
    said = warnings(phases)
    assert [step for step, _ in said] == [100, 700]
    assert "one prototype" in said[0][1]
    assert "teacher.center_momentum" in said[0][1]


def test_a_common_prototype_with_soft_targets_is_no_collapse():
    assert warnings([(step, SAME | {"dino/teacher_entropy": 0.4}) for step in range(0, 1000, 10)]) == []


def test_a_window_gives_the_means_since_it_was_last_read():
    window = Window()
    for value in (1.0, 2.0, 6.0):
        window.add({"loss": torch.tensor(value), "kl": torch.tensor(-value)})
    assert window.read() == ({"loss": 3.0, "kl": -3.0}, 0)
    window.add({"loss": torch.tensor(5.0), "kl": torch.tensor(0.0)})
    assert window.read() == ({"loss": 5.0, "kl": 0.0}, 0)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_value_that_is_not_finite_is_counted_and_spoils_no_mean(bad):
    window = Window()
    for value in (1.0, bad, 3.0):
        window.add({"loss": torch.tensor(value)})
    assert window.read() == ({"loss": 2.0}, 1)


def test_throughput_counts_images_and_the_share_of_time_spent_waiting():
    throughput = Throughput()
    batches = iter([1, 2])
    assert [throughput.waiting(batches), throughput.waiting(batches)] == [1, 2]
    throughput.count(64)
    read = throughput.read()
    assert read["images_per_second"] > 0
    assert 0 <= read["data_wait"] <= 1
    assert throughput.read()["images_per_second"] == 0
    throughput.waited(3600)
    assert throughput.read()["data_wait"] > 1, "what was waited elsewhere counts"
