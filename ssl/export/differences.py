"""How far each family's features lie from those of its exports, as docs/export.md states it.

    python -m nestling.ssl.export.differences docs/export.md

exports a small network of each family to every target and writes the table anew between the page's marks.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from nestling import backbones
from nestling.backbones import Backbone
from nestling.ssl.errors import UserError
from nestling.ssl.export.exporting import TARGETS, difference
from nestling.ssl.export.sizes import Size
from nestling.ssl.export.subject import Subject
from nestling.ssl.export.target import Target
from nestling.ssl.pages import renew

FAMILIES = {"xcit": "xcit_tiny_12_p16", "vit": "vit_tiny_p16", "swin": "swin_tiny_w7"}
SIZES: list[Size] = [(96, 96), (224, 224), (448, 672)]


def stirred(backbone: Backbone, seed: int = 0) -> Backbone:
    """The same in evaluation mode with every tensor moved off its initial value.

    Zero biases and unit variances would hide what a layout loses.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in backbone.state_dict().items():
            if value.is_floating_point():
                noise = torch.randn(value.shape, generator=generator).to(value.dtype)
                value.add_(0.1 * noise.abs() if name.endswith("running_var") else 0.05 * noise)
    return backbone.eval().requires_grad_(False)


def rows(family: str, name: str) -> list[list[str]]:
    """One row for each size: the family, the size, the largest difference for each target."""
    columns = [column(example(name), target) for target in TARGETS.values()]
    pixels = [f"{height} x {width}" for height, width in SIZES]
    return [[family, size, *cells] for size, *cells in zip(pixels, *columns, strict=True)]


def example(name: str) -> Subject:
    """The backbone that is measured, the same on every call."""
    torch.manual_seed(0)
    return Subject(stirred(backbones.create(name)), {}, [0.5] * 3, [0.25] * 3, side=224)


def column(subject: Subject, target: Target, sizes: Sequence[Size] = SIZES) -> list[str]:
    """The largest difference at each size; `refused` where nestling or the target's program says so."""
    if not target.can_read():
        raise UserError(f"the table needs {target.loader}, which is not installed")
    with TemporaryDirectory() as place:
        try:
            target.write(subject, Path(place))
        except UserError:
            return ["refused"] * len(sizes)
        network, cells = target.read(subject, Path(place)), []
        for size in reversed(sizes):  # transformers' Swin gives up shifting for good at a small size
            try:
                cells.append(f"{difference(subject, network, size)[0]:.2g}")
            except (RuntimeError, ValueError, AssertionError):  # a size that the program can't take
                cells.append("refused")
        return cells[::-1]


def table(lines: list[list[str]]) -> str:
    """The rows in Markdown."""
    head = ["family", "pixels", *TARGETS]
    marks = ["---", "---", *("---:" for _ in TARGETS)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, marks, *lines))


if __name__ == "__main__":
    measured = [line for family, name in FAMILIES.items() for line in rows(family, name)]
    renew(Path(sys.argv[1]), "differences", table(measured))
