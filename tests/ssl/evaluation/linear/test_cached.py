"""Heads on kept features, and what they take."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_probe import task_of, write_probe

from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.linear.cached import Cached, Logistic, refuse_above_memory
from nestling.ssl.evaluation.linear.heads import HeadSpec
from nestling.ssl.evaluation.linear.logistic import loss_and_gradient


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = write_probe(tmp_path_factory.mktemp("probe"))
    (run.parent / "train/class_1/0002.png").write_bytes(b"broken")
    return run


def features_of(task, indices):
    blocks = task.trained.backbone.last_blocks(torch.stack([normalised(task, index) for index in indices]), 4)
    return torch.cat([*(block.cls for block in blocks), blocks[-1].patches.mean(1)], 1)


def normalised(task, index):
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    pixels = torch.from_numpy(task.view(task.train.load(index), index)) / 255
    return (pixels - mean.view(3, 1, 1)) / std.view(3, 1, 1)


@pytest.mark.parametrize("learner", [Cached, Logistic])
def test_standardised_features_are_folded_into_the_head(run, learner):
    """The head on raw features says what the minimum, or the step of SGD, on standardised ones says."""
    task = task_of(run, standardise=True, epochs=1, readouts=["last4:cls+mean_patch"], tolerance=1e-9)
    made = learner(task)
    spec = HeadSpec("last4:cls+mean_patch", made.setting, 0.5)
    indices = np.arange(0, 30, 2)
    weight, bias = made.fit([spec], indices).one(spec)
    rows = features_of(task, indices).double()
    rows = (rows - rows.mean(0)) / rows.std(0, correction=0)
    moved = weight.double() * features_of(task, indices).double().std(0, correction=0)
    shift = bias.double() + weight.double() @ features_of(task, indices).double().mean(0)
    labels = torch.from_numpy(task.train_labels[indices])
    if learner is Logistic:
        _, slope, of_bias = loss_and_gradient(rows, labels, moved, shift, 1 / (0.5 * len(rows)))
        assert max(slope.abs().max(), of_bias.abs().max()) < 1e-6
        return
    start = Cached(task_of(run, epochs=1, readouts=[spec.readout], lr=[1e-12]))
    first, _ = start.fit([spec._replace(value=1e-30)], indices).one(spec._replace(value=1e-30))
    first = first.double()
    error = (rows @ first.mT).softmax(1) - F.one_hot(labels, 6)
    torch.testing.assert_close(moved, first - 0.5 * error.mT @ rows / len(rows), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(shift, -0.5 * error.mean(0), rtol=1e-3, atol=1e-4)


def test_features_that_are_not_finite_are_refused_by_the_name_of_an_image(run):
    task = task_of(run)
    with torch.no_grad():
        next(task.trained.backbone.parameters()).fill_(torch.nan)
    with pytest.raises(UserError, match=r"29 of 29 images of data\.train are not finite.*0000\.png"):
        Cached(task)


def test_a_network_of_fewer_than_four_blocks_is_read_at_its_last(tmp_path, caplog):
    caplog.set_level("INFO", "nestling")
    task = task_of(write_probe(tmp_path, classes=2, per_class=2, depth=1))
    assert task.widths == {"cls": 16, "cls+mean_patch": 32}
    assert "does not show its last 4 blocks" in caplog.text


def test_more_features_than_memory_are_refused_with_both_numbers():
    refuse_above_memory(10, {"cls": 4}, 480)
    refuse_above_memory(10**12, {"cls": 4}, None)
    with pytest.raises(
        UserError, match=r"1920 numbers of each of 2000000 images take 46\.1 GB.*has 16\.0 GB"
    ):
        refuse_above_memory(2_000_000, {"last4:cls": 1536, "last1:mean_patch": 384}, 16 * 10**9)
