"""What was found at the sizes: rows of a table, a CSV, and a picture."""

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path

from PIL import Image

from nestling.ssl.evaluation import canvas
from nestling.ssl.evaluation.curve import SHARE, Points, learning_curve
from nestling.ssl.evaluation.resolution.judge import Results
from nestling.ssl.evaluation.resolution.sizes import Size
from nestling.ssl.run.disk import replaced

TITLES = {
    "knn": "k-NN, top-1 %",
    "linear": "linear, top-1 %",
    "images_per_second": "images/s",
    "peak_memory_mb": "memory, MB",
}
UNITS = {"images_per_second": "images/s", "peak_memory_mb": "MB"}  # accuracies are shares
FORWARD = "Forward passes in float32, on the machine that the results name."
SAME_AREA = "side of the square of as many pixels"


def kind_of(measure: str) -> str | None:
    """The title's key of a measure that tables show; None for others, such as top-5."""
    kind = measure.partition("/")[0]
    return kind if kind in TITLES and "top5" not in measure else None


def table_rows(found: Mapping[str, Results]) -> Iterator[list[str]]:
    """A row for each network and size, with the columns of TITLES."""
    for network, results in found.items():
        for size, measures in results.items():
            cells = {kind_of(name): _cell(kind_of(name), value) for name, value in measures.items()}
            yield [network, size, *(cells[kind] for kind in TITLES)]


def _cell(kind: str | None, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{100 * value:.1f}" if kind in ("knn", "linear") else f"{value:.4g}"


def write_csv(path: Path, found: Mapping[str, Results], sizes: Mapping[str, Size]) -> None:
    """All measures as they are, shares between 0 and 1, an empty cell where one could not be told.

    Networks judged with different k or poolings have columns of their own.
    """
    measures = list(
        dict.fromkeys(name for results in found.values() for row in results.values() for name in row)
    )
    with replaced(path) as draft, draft.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["network", "height", "width", *measures])
        for network, results in found.items():
            for size, row in results.items():
                rows.writerow([network, *sizes[size], *(row.get(name) for name in measures)])


def picture(found: Mapping[str, Results], sizes: Mapping[str, Size], train_size: str) -> Image.Image:
    """Accuracies, speed and memory over the size: lines through the squares, dots for the other shapes.

    Memory is left out where none could be told.
    """
    trained = "at the test size too" if train_size == "test" else "at the network's own size"
    accuracy = f"Training images {trained}."
    panels = [
        _panel(found, sizes, "knn", "k-NN accuracy over the test size, %", accuracy),
        _panel(found, sizes, "linear", "Linear accuracy over the test size, %", accuracy),
        _panel(found, sizes, "images_per_second", "Images per second over the test size", FORWARD),
    ]
    if any(_values("peak_memory_mb", row) for results in found.values() for row in results.values()):
        panels.append(_panel(found, sizes, "peak_memory_mb", "Memory over the test size, MB", FORWARD))
    lines = [canvas.beside(panels[start : start + 2], gap=56) for start in range(0, len(panels), 2)]
    return canvas.margin(canvas.stacked(lines, gap=36), 40)


def _panel(
    found: Mapping[str, Results], sizes: Mapping[str, Size], kind: str, title: str, caption: str
) -> Image.Image:
    squares = {text for text, (height, width) in sizes.items() if height == width}
    lines: dict[str, Points] = {}
    others: dict[str, Points] = {}
    for network, results in found.items():
        points = {
            text: (_side(sizes[text]), value) for text, row in results.items() for value in _values(kind, row)
        }
        # Without squares the shapes make the line.
        on_line = [points[text] for text in points if text in squares] or list(points.values())
        lines[network] = sorted(on_line)
        others[network] = [point for text, point in points.items() if text not in squares]
    dots = " Dots beside the lines are sizes that are not square." if len(squares) < len(sizes) else ""
    curve = learning_curve(lines, {}, axis=SAME_AREA, dots=others, unit=UNITS.get(kind, SHARE))
    return canvas.panel(curve, title, caption + dots)


def _side(size: Size) -> float:
    return float((size[0] * size[1]) ** 0.5)


def _values(kind: str, measures: Mapping[str, float | None]) -> list[float]:
    """The measure of that kind; none where it could not be told."""
    return [value for name, value in measures.items() if kind_of(name) == kind and value is not None]
