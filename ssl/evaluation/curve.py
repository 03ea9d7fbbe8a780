"""The learning curve: accuracy over epochs, or over another axis, beside what it must beat."""

import math
from collections.abc import Mapping, Sequence

from PIL import Image, ImageDraw

from nestling.ssl.evaluation import canvas

Points = Sequence[tuple[float, float]]

SHARE = "%"  # the unit of numbers between 0 and 1


def learning_curve(
    series: Mapping[str, Points],
    bars: Mapping[str, float],
    width: int = 860,
    height: int = 360,
    axis: str = "epoch",
    dots: Mapping[str, Points] | None = None,
    unit: str = SHARE,
) -> Image.Image:
    """Lines of (epoch, share) and dashed levels, each named at its right end.

    Args:
        series: what was learned; one without points keeps its colour and isn't drawn.
        bars: constant levels, such as raw pixels and the untrained network.
        axis: what the first numbers are.
        dots: further points of a series that lie beside its line.
        unit: of the second numbers; of all but shares the axis begins at 0.
    """
    beside = dots or {}
    labels = {name: f"{name} {_told(value, unit)}" for name, value in _ends(series, bars).items()}
    right = width - max(canvas.text_width(text, canvas.SMALL) for text in labels.values()) - 22
    drawn = [point for points in (*series.values(), *beside.values()) for point in points]
    epochs, shares = [epoch for epoch, _ in drawn], [share for _, share in drawn] + list(bars.values())
    ticks = _tenths(min(shares), max(shares)) if unit == SHARE else _from_zero(max(shares))
    left = max(52, 16 + max(canvas.text_width(text, canvas.SMALL) for text in ticks.values()))
    box = (left, 16, right, height - 50)
    limits = (_floor(min(shares)), _ceiling(max(shares))) if unit == SHARE else (0.0, max(ticks))
    scale = _Scale(box, (min(epochs), max(epochs)), limits)
    page = Image.new("RGB", (width, height), canvas.WHITE)
    draw = ImageDraw.Draw(page)
    _draw_axes(draw, scale, ticks, axis)
    colors = {name: canvas.SERIES[i % len(canvas.SERIES)] for i, name in enumerate(series)}
    for name, share in bars.items():
        _dashed(draw, box[0], box[2], scale.y(share), canvas.GRAY)
        colors[name] = canvas.GRAY
    for name, points in series.items():
        if not points:
            continue
        places = [(scale.x(epoch), scale.y(share)) for epoch, share in points]
        _smooth_line(page, places, colors[name])
        for epoch, share in beside.get(name, ()):
            _smooth_line(page, [(scale.x(epoch), scale.y(share))], colors[name])
    ends = {name: scale.y(value) for name, value in _ends(series, bars).items()}
    for name, y in _apart(ends, canvas.SMALL + 5, box[1], box[3]).items():
        draw.text((right + 14, y), labels[name], colors[name], canvas.font(canvas.SMALL), anchor="lm")
    return page


class _Scale:
    """From epochs and shares to pixels of a box (left, top, right, bottom)."""

    def __init__(
        self, box: tuple[int, int, int, int], epochs: tuple[float, float], shares: tuple[float, float]
    ) -> None:
        self.box, self.epochs, self.shares = box, epochs, shares

    def x(self, epoch: float) -> float:
        first, last = self.epochs
        left, _, right, _ = self.box
        return left + 10 + (right - left - 20) * ((epoch - first) / (last - first) if last > first else 1)

    def y(self, share: float) -> float:
        low, high = self.shares
        _, top, _, bottom = self.box
        return bottom - (bottom - top) * (share - low) / (high - low)


def _ends(series: Mapping[str, Points], bars: Mapping[str, float]) -> dict[str, float]:
    return {name: points[-1][1] for name, points in series.items() if points} | dict(bars)


def _told(value: float, unit: str) -> str:
    return f"{100 * value:.0f} %" if unit == SHARE else f"{_plain(value)} {unit}"


def _plain(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _tenths(low: float, high: float) -> dict[float, str]:
    """The marks of shares, with their text."""
    first, last = round(10 * _floor(low)), round(10 * _ceiling(high))
    step = 2 if last - first > 5 else 1
    return {tenth / 10: f"{10 * tenth}" for tenth in range(first, last + 1, step)}


def _from_zero(high: float) -> dict[float, str]:
    """At most six marks from 0 to `high` or a little above, 1, 2 or 5 of a power of ten apart."""
    if high <= 0:
        return {0.0: "0", 1.0: "1"}
    unit = 10.0 ** math.floor(math.log10(high / 5))
    step = next(factor * unit for factor in (1, 2, 5, 10) if high <= 5 * factor * unit)
    return {place * step: _plain(place * step) for place in range(math.ceil(high / step) + 1)}


def _floor(share: float) -> float:
    return max(0, int(share * 10 - 0.2)) / 10


def _ceiling(share: float) -> float:
    return min(10, int(share * 10 + 1.2)) / 10


def _draw_axes(draw: ImageDraw.ImageDraw, scale: _Scale, ticks: Mapping[float, str], axis: str) -> None:
    left, _, right, bottom = scale.box
    small = canvas.font(canvas.SMALL)
    for value, text in ticks.items():
        y = scale.y(value)
        draw.line((left, y, right, y), canvas.LIGHT, width=1)
        draw.text((left - 8, y), text, canvas.GRAY, small, anchor="rm")
    first, last = scale.epochs
    step = next(
        step for unit in _units() for step in (unit, 2 * unit, 5 * unit) if (last - first) / step <= 8
    )
    epoch = step * -(-first // step)
    while epoch <= last:
        draw.text((scale.x(epoch), bottom + 6), f"{epoch:g}", canvas.GRAY, small, anchor="mt")
        epoch += step
    draw.text(((left + right) / 2, bottom + 30), axis, canvas.GRAY, small, anchor="mt")


def _units() -> Sequence[int]:
    return [10**power for power in range(10)]


def _smooth_line(page: Image.Image, places: Sequence[tuple[float, float]], color: canvas.Color) -> None:
    """A line with a dot at its end, drawn four times as large: Pillow does not smooth edges itself."""
    mask = Image.new("L", (4 * page.width, 4 * page.height))
    draw = ImageDraw.Draw(mask)
    large = [(4 * x, 4 * y) for x, y in places]
    draw.line(large, 255, width=15, joint="curve")
    x, y = large[-1]
    draw.ellipse((x - 24, y - 24, x + 24, y + 24), 255)
    page.paste(color, mask=mask.reduce(4))


def _dashed(draw: ImageDraw.ImageDraw, left: float, right: float, y: float, color: canvas.Color) -> None:
    x = left
    while x < right:
        draw.line((x, y, min(x + 10, right), y), color, width=2)
        x += 18


def _apart(places: Mapping[str, float], distance: float, top: float, bottom: float) -> dict[str, float]:
    """Heights moved so that neighbours keep `distance` where the room allows it."""
    moved: dict[str, float] = {}
    last = top - distance
    for name in sorted(places, key=places.__getitem__):
        last = moved[name] = max(places[name], last + distance)
    next_one = bottom + distance
    for name in reversed(moved):
        next_one = moved[name] = min(moved[name], next_one - distance)
    return moved
