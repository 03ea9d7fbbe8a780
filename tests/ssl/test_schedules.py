import math

import numpy as np
import pytest

from nestling.ssl.config import Backbone, Config, Optim, Teacher, Train
from nestling.ssl.data.course import Course
from nestling.ssl.schedules import Schedules, cosine_at, linear_at, peak_learning_rate, warmup_cosine_at


def schedules(steps_per_epoch: int = 7, global_batch: int = 512, **train: int) -> Schedules:
    config = Config(
        train=Train(**{"epochs": 20, **train}),
        optim=Optim(lr=5e-4, lr_end=1e-5, warmup_epochs=10, weight_decay=0.04, weight_decay_end=0.4),
        teacher=Teacher(
            momentum=0.996, temperature_start=0.04, temperature=0.07, temperature_warmup_epochs=5
        ),
    )
    return Schedules(config, course(config, steps_per_epoch, global_batch))


def course(config: Config, steps_per_epoch: int, global_batch: int) -> Course:
    return Course(steps_per_epoch * global_batch, global_batch, config.train.epochs)


def published_cosine(base: float, end: float, num_steps: int) -> np.ndarray:
    """DINO's table without warm-up: end + (base - end) (1 + cos(pi i / n)) / 2 for i < n."""
    return np.array(
        [end + 0.5 * (base - end) * (1 + np.cos(np.pi * i / num_steps)) for i in range(num_steps)]
    )


def test_cosine_equals_the_published_table():
    ours = [cosine_at(step, 140, 0.04, 0.4) for step in range(140)]
    np.testing.assert_allclose(ours, published_cosine(0.04, 0.4, 140), rtol=1e-12)


def test_warmup_then_cosine_equals_the_published_table_after_the_warmup():
    ours = [warmup_cosine_at(step, 140, 70, 1e-3, 1e-5) for step in range(140)]
    np.testing.assert_allclose(ours[:70], [1e-3 * (i + 1) / 70 for i in range(70)], rtol=1e-12)
    np.testing.assert_allclose(ours[70:], published_cosine(1e-3, 1e-5, 70), rtol=1e-12)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
@pytest.mark.parametrize("num_warmup", [0, 1, 5, 50])
def test_the_rate_is_positive_and_defined_at_every_step_of_any_length(num_steps, num_warmup):
    rates = [warmup_cosine_at(step, num_steps, num_warmup, 1.0, 0.1) for step in range(60)]
    assert all(0 < rate <= 1 and math.isfinite(rate) for rate in rates)
    assert rates[-1] == 0.1


def test_the_temperature_warms_up_linearly_and_stays():
    assert [linear_at(step, 4, 0.0, 1.0) for step in range(6)] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    assert linear_at(0, 0, 0.0, 1.0) == 1.0


def test_all_schedules_start_and_end_where_the_config_says():
    plan = schedules()
    first, last, past = plan.at(0), plan.at(plan.num_steps - 1), plan.at(10 * plan.num_steps)
    assert (first.weight_decay, first.momentum, first.temperature) == pytest.approx((0.04, 0.996, 0.04))
    assert (past.lr, past.weight_decay, past.momentum, past.temperature) == (1e-5, 0.4, 1.0, 0.07)
    assert last.lr == pytest.approx(past.lr, rel=0.1)


def test_values_do_not_depend_on_how_the_global_batch_is_made_up():
    assert schedules(global_batch=512).at(33) == schedules(
        global_batch=512, batch_size=64, accumulation=8
    ).at(33)


@pytest.mark.parametrize(("scaling", "peak"), [("linear", 2e-3), ("sqrt", 1e-3), ("none", 5e-4)])
def test_the_peak_rate_follows_the_scaling_rule(scaling, peak):
    assert peak_learning_rate(5e-4, scaling, 1024) == pytest.approx(peak)


def test_the_published_xcit_recipe_reaches_its_peak_at_the_end_of_the_warmup():
    config = Config(train=Train(epochs=300), optim=Optim(lr=5e-4, warmup_epochs=10))
    plan = Schedules(config, course(config, 1251, 1024))
    assert plan.at(12510 - 1).lr == pytest.approx(2e-3)
    assert max(plan.at(step).lr for step in range(0, plan.num_steps, 101)) <= 2e-3


def test_the_last_layer_is_frozen_for_whole_epochs_of_real_steps():
    frozen = [schedules(steps_per_epoch=7).at(step).last_layer_frozen for step in range(20)]
    assert frozen == [True] * 7 + [False] * 13


@pytest.mark.parametrize(
    ("init_from", "freeze_epochs", "epochs", "expected"),
    [
        (None, None, 20, 0),
        ("x.pth", None, 20, 10),
        ("x.pth", None, 5, 5),
        ("x.pth", 0, 20, 0),
        (None, 2, 20, 20),
    ],
)
def test_the_backbone_waits_for_a_fresh_head_where_it_starts_from_weights(
    init_from, freeze_epochs, epochs, expected
):
    config = Config(
        init_from=init_from, backbone=Backbone(freeze_epochs=freeze_epochs), train=Train(epochs=epochs)
    )
    plan = Schedules(config, course(config, steps_per_epoch=10, global_batch=256))
    frozen = [plan.at(step).backbone_frozen for step in range(plan.num_steps)]
    assert frozen == [True] * expected + [False] * (plan.num_steps - expected)
