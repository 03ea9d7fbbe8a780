"""Which classes are told apart and which are confused, as CSV files.

Shapes used below: M judged images, C classes.
"""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from nestling.ssl.run.disk import replaced


def confusions(truth: Tensor, predicted: Tensor) -> dict[tuple[int, int], int]:
    """How often an image of one class was taken for another, or for its own; only what occurs.

    Not a matrix of C x C numbers: twenty thousand classes would take three gigabytes.

    Shape:
        truth, predicted: (M,) int64
    """
    pairs, counts = np.unique(np.stack([truth.numpy(), predicted.numpy()]), axis=1, return_counts=True)
    return {(int(a), int(b)): count for a, b, count in zip(*pairs, counts.tolist(), strict=True)}


def per_class(counts: dict[tuple[int, int], int], names: Sequence[str]) -> list[list[Any]]:
    """Class, images, top-1 and the class it is most often taken for, the first of several, "" for none."""
    by_class: dict[int, dict[int, int]] = {}
    for (truth, predicted), count in counts.items():
        by_class.setdefault(truth, {})[predicted] = count
    rows = []
    for truth, taken_for in sorted(by_class.items()):
        images = sum(taken_for.values())
        wrong = {other: count for other, count in sorted(taken_for.items()) if other != truth}
        confused = names[max(wrong, key=lambda other: wrong[other])] if wrong else ""
        rows.append([names[truth], images, taken_for.get(truth, 0) / images, confused])
    return rows


def write_tables(
    out: Path, found: Mapping[str, dict[tuple[int, int], int]], names: Sequence[str]
) -> list[str]:
    """Beside the results in `out`, for each pooling: per class, and the confusion matrix.

    Returns the names of the files.
    """
    files = []
    for pooling, counts in found.items():
        stem = f"{out.stem}_{pooling.replace(':', '_')}"
        classes, matrix = (out.with_name(f"{stem}_{kind}.csv") for kind in ("classes", "confusion"))
        write_per_class(classes, per_class(counts, names))
        write_confusion(matrix, counts, names)
        files += [classes.name, matrix.name]
    return files


def write_per_class(file: Path, rows: Iterable[Sequence[Any]]) -> None:
    """The rows of `per_class` under their heads."""
    _write(file, ["class", "images", "top-1", "most confused with"], rows)


def write_confusion(file: Path, counts: dict[tuple[int, int], int], names: Sequence[str]) -> None:
    """One row a true class, one column a predicted one: those that occur."""
    truths = sorted({truth for truth, _ in counts})
    seen = sorted({number for pair in counts for number in pair})
    head = ["true class", *(names[number] for number in seen)]
    _write(
        file, head, ([names[truth], *(counts.get((truth, other), 0) for other in seen)] for truth in truths)
    )


def _write(file: Path, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    # Names of folders may be no UTF-8; they are written as the bytes they are.
    with (
        replaced(file) as draft,
        draft.open("w", encoding="utf-8", errors="surrogateescape", newline="") as out,
    ):
        writer = csv.writer(out)
        writer.writerow(head)
        writer.writerows(rows)
