"""Many heads at once against torch's nn.Linear and SGD, one head at a time."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.linear.choice import best_of
from nestling.ssl.evaluation.linear.descent import Descent
from nestling.ssl.evaluation.linear.heads import HeadSpec, first_heads
from nestling.ssl.evaluation.linear.scores import Scores

WIDTHS = {"cls": 5, "cls+mean_patch": 9}
SPECS = [HeadSpec(name, "lr", lr) for name in WIDTHS for lr in (1e-3, 0.5, 4.0)]
STEPS, BATCH = 12, 64


def batches():
    torch.manual_seed(1)
    for number in range(STEPS):
        count = 3 if number == STEPS - 1 else 16  # a small last batch
        yield {name: torch.randn(count, dim) for name, dim in WIDTHS.items()}, torch.randint(4, (count,))


def trained(specs):
    grid = first_heads(specs, WIDTHS, 4, 0, "cpu")
    descent = Descent(grid, BATCH, STEPS, 0.9, together=True)
    for vectors, labels in batches():
        descent.step(vectors, labels)
    return grid


def trained_alone(spec):
    """As DINO's linear evaluation writes it."""
    weight, bias = first_heads([spec], WIDTHS, 4, 0, "cpu").one(spec)
    layer = nn.Linear(WIDTHS[spec.readout], 4)
    layer.load_state_dict({"weight": weight, "bias": bias})
    optimizer = torch.optim.SGD(layer.parameters(), lr=spec.value * BATCH / 256, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS, eta_min=0)
    for vectors, labels in batches():
        optimizer.zero_grad()
        F.cross_entropy(layer(vectors[spec.readout]), labels).backward()
        optimizer.step()
        schedule.step()
    return layer


def test_every_head_of_a_grid_is_what_torch_trains_alone():
    grid = trained(SPECS)
    for spec in SPECS:
        alone = trained_alone(spec)
        weight, bias = grid.one(spec)
        torch.testing.assert_close(weight, alone.weight.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(bias, alone.bias.detach(), rtol=1e-5, atol=1e-6)
    first, _ = first_heads(SPECS, WIDTHS, 4, 0, "cpu").one(SPECS[0])
    assert not torch.equal(first, grid.one(SPECS[0])[0])


def test_logits_stand_in_the_order_of_the_specs():
    grid, (vectors, _) = trained(SPECS[::-1]), next(batches())
    logits = grid.logits(vectors)
    assert logits.shape == (16, 6, 4)
    for place, spec in enumerate(grid.specs):
        torch.testing.assert_close(logits[:, place], F.linear(vectors[spec.readout], *grid.one(spec)))


def test_a_head_that_becomes_nan_leaves_the_others_as_they_are():
    grid = trained([SPECS[0], HeadSpec("cls", "lr", 1e39), *SPECS[1:]])
    assert [spec.value for spec, ok in zip(grid.specs, grid.finite(), strict=True) if not ok] == [1e39]
    beside = trained(SPECS)
    for spec in SPECS:
        torch.testing.assert_close(grid.one(spec), beside.one(spec), rtol=1e-6, atol=1e-7)


def test_a_step_without_images_changes_nothing_but_the_schedule():
    grid = first_heads(SPECS, WIDTHS, 4, 0, "cpu")
    before = [tensor.clone() for tensor in grid.parameters]
    descent = Descent(grid, BATCH, STEPS, 0.9, together=False)
    descent.step({}, torch.empty(0, dtype=torch.long))
    assert all(map(torch.equal, before, grid.parameters))
    assert descent.step_number == 1
    with pytest.raises(UserError, match="gone"):
        descent.step({}, torch.empty(0, dtype=torch.long), UserError("gone"))


def test_the_best_head_is_the_first_of_the_best_that_are_finite():
    scores = Scores(torch.tensor([0.2, 0.9, 0.7, 0.7]), torch.ones(4), torch.ones(4, dtype=torch.bool), 10)
    alive = torch.tensor([True, False, True, True])
    assert best_of(SPECS[:4], scores, alive) == 2
    with pytest.raises(UserError, match=r"all 4 heads became NaN.*smallest lr \(0\.001\).*linear\.lr"):
        best_of(SPECS[:4], scores, torch.zeros(4, dtype=torch.bool))
