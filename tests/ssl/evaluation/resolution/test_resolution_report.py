"""What is told of the sizes: rows, a CSV, and a picture for any mix of shapes."""

import csv

import numpy as np
import pytest

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


@pytest.mark.parametrize("kept", [["96", "224", "96x224"], ["96", "224"], ["96x224"], ["224"]])
def test_the_picture_shows_squares_as_lines_and_other_shapes_as_dots(kept):
    sizes = {text: SIZES[text] for text in kept}
    found = {name: {text: results[text] for text in kept} for name, results in FOUND.items()}
    page = np.array(report.picture(found, sizes, "own"))
    for color in report.canvas.SERIES[:2]:  # one for each network
        assert (page == color).all(axis=2).any()
