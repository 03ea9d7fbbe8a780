"""Test sizes as users write them: a side, or height x width."""

import re
from collections.abc import Sequence

from nestling.backbones import Backbone
from nestling.ssl.errors import UserError
from nestling.ssl.names import printable

Size = tuple[int, int]  # height, width
_WRITTEN = re.compile(r"([1-9]\d{0,4})(?:x([1-9]\d{0,4}))?")


def read_sizes(written: Sequence[str]) -> dict[str, Size]:
    """Each size by the text it is shown as, `224` or `224x320`, in the order given, each once.

    Raises:
        UserError: one is neither form.
    """
    sizes: dict[str, Size] = {}
    for text in written:
        match = _WRITTEN.fullmatch(text.strip())
        if match is None:
            raise UserError(
                f"sizes: {printable(text)} is no size; write a side such as 224, or height x width as 224x320"
            )
        height = int(match[1])
        size = (height, int(match[2] or height))
        sizes[shown(size)] = size
    return sizes


def around(side: int, step: int) -> list[str]:
    """Squares of half, all, one and a half and twice of a side, in whole steps."""
    sides = (max(1, round(factor * side / step)) * step for factor in (0.5, 1, 1.5, 2))
    return [str(found) for found in dict.fromkeys(sides)]


def shown(size: Size) -> str:
    """A square by its side, others as height x width."""
    height, width = size
    return str(height) if height == width else f"{height}x{width}"


def refuse_unfit(backbone: Backbone, sizes: Sequence[Size]) -> None:
    """Raise UserError for a size that a backbone can't take, naming the nearest that it can."""
    for size in sizes:
        try:
            backbone.check_size(*size)
        except ValueError as error:
            raise UserError(f"sizes: {shown(size)} can't be judged: {error}") from error
