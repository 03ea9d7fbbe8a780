"""What a layout's reader gives, and the renaming that all of them do."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Converted:
    """A file's tensors under our keys.

    `options` are the settings that no tensor shows, `left_out` the file's keys that are known to be no
    part of a backbone, `notes` what a user should know.
    """

    family: str
    layout: str
    tensors: dict[str, Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def rename(tensors: Mapping[str, Tensor], rules: Iterable[tuple[str, str]]) -> dict[str, Tensor]:
    """Every rule (a pattern from the key's start, its replacement) in turn, on every key."""
    compiled = [(re.compile(pattern), replacement) for pattern, replacement in rules]
    renamed = {}
    for key, value in tensors.items():
        for pattern, replacement in compiled:
            if pattern.match(key):
                key = pattern.sub(replacement, key, count=1)
        renamed[key] = value
    return renamed


def take(tensors: dict[str, Tensor], pattern: str) -> list[str]:
    """Remove the keys that match a pattern entirely; returns them."""
    taken = [key for key in tensors if re.fullmatch(pattern, key)]
    for key in taken:
        del tensors[key]
    return taken


def join(tensors: dict[str, Tensor], parts: Sequence[str], whole: str) -> None:
    """Concatenate along the rows what lies under `place + part` for all parts, as `place + whole`."""
    for place in [key.removesuffix(parts[0]) for key in tensors if key.endswith(parts[0])]:
        if all(place + part in tensors for part in parts):
            tensors[place + whole] = torch.cat([tensors.pop(place + part) for part in parts])


def split(tensors: dict[str, Tensor], whole: str, parts: Sequence[str], place: str = ".*") -> None:
    """Undo `join` into parts of equal length, for the keys `place + whole`, `place` a pattern."""
    for key in [key for key in tensors if re.fullmatch(place + re.escape(whole), key)]:
        prefix = key.removesuffix(whole)
        chunks = tensors.pop(key).chunk(len(parts))
        tensors.update({prefix + part: chunk for part, chunk in zip(parts, chunks, strict=True)})


def grid_side(num: int, what: str) -> int:
    """The side of a square table of `num` entries. Raises ValueError for another one."""
    side = math.isqrt(max(num, 0))
    if side * side != num or num == 0:
        raise ValueError(f"{what} has {num} entries, which are no square grid; only square tables are read")
    return side
