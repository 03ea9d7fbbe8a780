"""What is told of the sizes: rows, a CSV, and a picture for any mix of shapes."""

import csv

import numpy as np
import pytest

from nestling.ssl.evaluation import canvas, curve
from nestling.ssl.evaluation.resolution import report

SIZES = {"96": (96, 96), "224": (224, 224), "96x224": (96, 224)}


def measures(share, memory=12.5):
    return {
        "knn/cls/top1_k5": share,
        "knn/cls/top5_k5": 1.0,
        "linear/cls/top1": share / 2,
        "images_per_second": 1234.5,
        "peak_memory_mb": memory,
    }


FOUND = {
    "ours": {text: measures(0.5 + place / 10) for place, text in enumerate(SIZES)},
    "theirs": {text: measures(0.4, None) for text in SIZES},
}


def test_a_row_shows_percent_and_a_dash_for_what_could_not_be_told():
    rows = list(report.table_rows(FOUND))
    assert rows[1] == ["ours", "224", "60.0", "30.0", "1234", "12.5"]
    assert rows[5] == ["theirs", "96x224", "40.0", "20.0", "1234", "–"]


def test_the_csv_holds_every_number(tmp_path):
    report.write_csv(tmp_path / "found.csv", FOUND, SIZES)
    with (tmp_path / "found.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6
    assert (rows[2]["height"], rows[2]["width"], float(rows[2]["knn/cls/top1_k5"])) == ("96", "224", 0.7)
    assert float(rows[0]["knn/cls/top5_k5"]) == 1
    assert rows[3]["peak_memory_mb"] == ""


def has(page, color):
    return bool((page == color).all(axis=2).any())


@pytest.mark.parametrize("kept", [["96", "224", "96x224"], ["96", "224"], ["96x224"], ["224"]])
def test_the_picture_shows_squares_as_lines_and_other_shapes_as_dots(kept):
    sizes = {text: SIZES[text] for text in kept}
    found = {name: {text: results[text] for text in kept} for name, results in FOUND.items()}
    page = np.array(report.picture(found, sizes, "own"))
    middle = page.shape[0] // 2, page.shape[1] // 2
    for rows in (page[: middle[0]], page[middle[0] :]):  # accuracies above, speed and memory below
        for panel in (rows[:, : middle[1]], rows[:, middle[1] :]):
            assert has(panel, canvas.SERIES[0])  # one colour for each network
    assert has(page[: middle[0], middle[1] :], canvas.SERIES[1])
    assert not has(page[middle[0] :, middle[1] :], canvas.SERIES[1]), "its memory could not be told"


def test_memory_that_no_network_could_tell_has_no_panel():
    page = np.array(report.picture({"theirs": FOUND["theirs"]}, SIZES, "own"))
    below, middle = page[page.shape[0] // 2 :], page.shape[1] // 2
    assert has(below[:, :middle], canvas.SERIES[0]), "images per second"
    assert (below[:, middle:] == 255).all()


@pytest.mark.parametrize(
    ("high", "marks"),
    [
        (1234.5, ["0", "500", "1000", "1500"]),
        (12.5, ["0", "5", "10", "15"]),
        (0.031, ["0", "0.01", "0.02", "0.03", "0.04"]),
        (100, ["0", "20", "40", "60", "80", "100"]),
        (0, ["0", "1"]),
    ],
)
def test_an_axis_that_is_no_share_is_marked_from_zero_in_round_steps(high, marks):
    assert list(curve._from_zero(high).values()) == marks
    assert max(curve._from_zero(high)) >= high
