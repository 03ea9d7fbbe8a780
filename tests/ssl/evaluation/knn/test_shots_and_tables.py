"""Draws per class, the per-class table and the confusion matrix, against plain counts."""

import csv
import logging

import numpy as np
import pytest
import torch

from nestling.ssl.evaluation.knn.shots import drawn, draws, summary
from nestling.ssl.evaluation.knn.tables import confusions, per_class, write_tables

LABELS = torch.tensor([2, 0, 1, 2, 0, 2, 2, 0, 1, 2])


def test_a_draw_takes_as_many_of_each_class_depends_on_seed_and_repeat_alone_and_grows(caplog):
    for seed in (0, 1):
        few, more = (drawn(LABELS, shots, 3, seed) for shots in (1, 2))
        assert torch.bincount(LABELS[few]).tolist() == [1, 1, 1]
        assert torch.bincount(LABELS[more]).tolist() == [2, 2, 2]
        assert set(few.tolist()) <= set(more.tolist())
        assert torch.equal(more, drawn(LABELS, 2, 3, seed))
        assert torch.equal(more, more.sort().values)
    different = {tuple(drawn(LABELS, 2, repeat, seed).tolist()) for repeat in range(4) for seed in range(4)}
    assert len(different) > 8
    with caplog.at_level(logging.WARNING, "nestling"):
        found = [(shots, len(places)) for shots, places in draws(LABELS, [1, 4], 2, 0)]
    assert found == [(1, 3), (1, 3), (4, 9), (4, 9)]
    assert "2 of 3 classes have fewer than 4 training images, the smallest 2" in caplog.text


def test_every_image_of_a_class_is_drawn_about_as_often():
    times = sum(torch.bincount(drawn(LABELS, 1, repeat, 0), minlength=10) for repeat in range(600))
    assert (times[LABELS == 2] - 120).abs().max() < 45  # four standard deviations


def test_the_summary_is_mean_and_sample_deviation():
    values = [0.5, 0.75, 0.7]
    assert summary([{"top1_k1": value} for value in values])["top1_k1"] == {
        "mean": pytest.approx(np.mean(values)),
        "std": pytest.approx(np.std(values, ddof=1)),
    }
    assert summary([{"top1_k1": 0.5}])["top1_k1"] == {"mean": 0.5, "std": None}


def read(file):
    with file.open(encoding="utf-8", errors="surrogateescape", newline="") as lines:
        return list(csv.reader(lines))


def test_tables_say_what_was_counted(tmp_path):
    names = ["ant", "b,\n\udcff", "cat", "dog"]  # the second is a folder that is no UTF-8
    generator = np.random.default_rng(0)
    truth, predicted = generator.integers(0, 3, 40), generator.integers(0, 4, 40)
    counts = confusions(torch.from_numpy(truth), torch.from_numpy(predicted))
    files = write_tables(tmp_path / "knn_7.json", {"last4:cls": counts}, names)
    assert files == ["knn_7_last4_cls_classes.csv", "knn_7_last4_cls_confusion.csv"]
    (head, *classes), (top, *matrix) = (read(tmp_path / file) for file in files)
    expected = np.bincount(4 * truth + predicted, minlength=12).reshape(3, 4)
    assert head == ["class", "images", "top-1", "most confused with"]
    assert top == ["true class", *names]
    assert [row[0] for row in matrix] == names[:3]
    assert [[int(cell) for cell in row[1:]] for row in matrix] == expected.tolist()
    for place, (row, counted) in enumerate(zip(classes, expected, strict=True)):
        assert row[:2] == [names[place], str(counted.sum())]
        assert float(row[2]) == pytest.approx(counted[place] / counted.sum())
        assert row[3] == names[np.where(np.arange(4) == place, -1, counted).argmax()]


def test_a_class_that_is_never_wrong_is_confused_with_none():
    counts = confusions(torch.tensor([1, 1, 0, 0, 0]), torch.tensor([1, 1, 2, 1, 0]))
    assert per_class(counts, ["a", "b", "c"]) == [["a", 3, 1 / 3, "b"], ["b", 2, 1.0, ""]]
