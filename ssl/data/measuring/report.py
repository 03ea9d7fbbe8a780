"""The facts of a data set as lines for a person."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nestling.ssl.data.measuring.facts import SMALL
from nestling.ssl.names import printable

GROUPS_SHOWN = 5
NAMES_SHOWN = 4  # of a group


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """What `measure` has found, of long lists the beginning."""
    whole = f"{found['images']} images in {printable(found['source'])}"
    yield f"{whole}, left out {found['passed_over']}" if found["passed_over"] else whole
    if found["measured"] < found["images"]:
        yield f"measured: {found['measured']} of them, evenly chosen"
    if found["readable"]:
        yield from _pixels(found["mean"], found["std"], found["window"])
        yield from _sizes(found["sizes"])
    yield from _depths(found["depths"], found["window"])
    yield from _duplicates(found["duplicates"])
    yield from _unreadable(found["unreadable"])


def _unreadable(failures: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """By reason, as a thousand files of one kind fail for the same one."""
    yield f"unreadable: {len(failures)}"
    by_reason: dict[str, list[str]] = {}
    for failure in failures:
        by_reason.setdefault(failure["reason"], []).append(printable(failure["path"]))
    for reason, paths in by_reason.items():
        yield from (f"  {path}: {reason}" for path in paths[:NAMES_SHOWN])
        if len(paths) > NAMES_SHOWN:
            yield f"  and {len(paths) - NAMES_SHOWN} more of which each {reason}"


def _pixels(mean: Sequence[float], std: Sequence[float], window: Sequence[float] | None) -> Iterator[str]:
    yield "mean and std of the pixels in [0, 1], each pixel alike; to normalise by them, add"
    if window:
        yield "  (of the pixels as they are scaled now: with the data.window below, measure again)"
    usable = [value or 1.0 for value in std]  # a channel that is the same everywhere has none to divide by
    yield f"  data.mean='{_numbers(mean)}' data.std='{_numbers(usable)}'"


def _numbers(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{value:.4g}" for value in values) + "]"


def _sizes(sizes: Mapping[str, Any]) -> Iterator[str]:
    (low_height, high_height), (low_width, high_width) = sizes["height"], sizes["width"]
    yield f"height: {low_height} to {high_height} pixels; width: {low_width} to {high_width}"
    shorter = sizes["shorter_side"]
    yield f"shorter side: {shorter['min']} to {shorter['max']} pixels, median {shorter['median']:g}"
    yield from _rows(shorter["histogram"])
    small = sizes[f"shorter_side_below_{SMALL}"]
    if small:
        yield (
            f"small: {small} images below {SMALL} pixels, the published local crops: lower views.local_size, "
            f"or leave them out by data.min_size={SMALL}"
        )
    yield "width / height:"
    yield from _rows(sizes["width_over_height"])


def _rows(counts: Mapping[str, int]) -> Iterator[str]:
    total = sum(counts.values())
    width, digits = max(map(len, counts)), len(str(total))
    for name, count in counts.items():
        yield f"  {name:>{width}}  {count:>{digits}}  {count / total:6.1%}"


def _depths(depths: Mapping[str, Any], window: Sequence[float] | None) -> Iterator[str]:
    for kind, depth in depths.items():
        values = f"values {depth['low']:g} to {depth['high']:g}"
        yield f"deeper than 8 bits: {depth['images']} images of {kind}, {values}"
    if window:
        yield "  they don't fit the range of their type; to scale them all alike by their own range, add"
        yield f"  data.window='[{window[0]!r}, {window[1]!r}]'"


def _duplicates(groups: Sequence[Sequence[str]]) -> Iterator[str]:
    spare = sum(len(group) - 1 for group in groups)
    if not groups:
        yield "duplicates: none"
        return
    yield f"duplicates: {spare} images have the same pixels as another one; groups: {len(groups)}"
    for group in groups[:GROUPS_SHOWN]:
        more = f" and {len(group) - NAMES_SHOWN} more" if len(group) > NAMES_SHOWN else ""
        yield f"  {' = '.join(printable(path) for path in group[:NAMES_SHOWN])}{more}"
    if len(groups) > GROUPS_SHOWN:
        yield f"  and {len(groups) - GROUPS_SHOWN} more groups"
