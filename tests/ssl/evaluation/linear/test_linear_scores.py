"""Counts of many heads against torchmetrics, one head at a time."""

import torch
from torchmetrics.functional.classification import multiclass_accuracy

from nestling.ssl.evaluation.linear.scores import Counter


def test_top_1_and_top_5_are_those_of_torchmetrics():
    torch.manual_seed(0)
    logits, labels = torch.randn(101, 3, 9), torch.randint(9, (101,))
    counter = Counter(3, "cpu")
    for part, wanted in zip(logits.split(40), labels.split(40), strict=True):
        counter.add(part, wanted)
    scores = counter.scores(together=True)
    assert scores.num_images == 101
    for head in range(3):
        for k, found in ((1, scores.top1), (5, scores.top5)):
            expected = multiclass_accuracy(logits[:, head], labels, 9, average="micro", top_k=k)
            assert abs(float(found[head]) - float(expected)) < 1e-6


def test_what_is_not_a_number_is_wrong_and_ties_go_to_the_smallest_class():
    logits = torch.zeros(2, 2, 3)
    logits[1, 1, 0] = torch.nan
    counter = Counter(2, "cpu")
    counter.add(logits, torch.tensor([0, 1]))
    scores = counter.scores(together=False)
    assert scores.top1.tolist() == [0.5, 0.5]
    assert scores.top5.tolist() == [1.0, 0.5]
    assert scores.finite.tolist() == [True, False]
