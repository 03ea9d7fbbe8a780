"""Read-outs share their parts, so two of them hold all: class tokens and mean patches of the last blocks.

Shapes used below: B images, D_i channels of block i.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nestling.ssl.evaluation.readouts import Readout


class Columns:
    """Which read-outs to keep of every image, and how the wanted ones are put together from them.

    DINOv2's four take 12 D numbers of an image kept one by one, 5 D this way.
    """

    def __init__(self, readouts: Sequence[Readout], block_widths: Sequence[int]) -> None:
        self._widths = list(block_widths)
        self._pieces = {wanted.name: _pieces(wanted) for wanted in readouts}
        used = {piece for pieces in self._pieces.values() for piece in pieces}
        # How far back each kind goes, in blocks.
        self._depths = {
            kind: max(back for each, back in used if each == kind) for kind in sorted({k for k, _ in used})
        }

    @property
    def kept(self) -> dict[str, int]:
        """Names of the read-outs to keep, and their widths."""
        return {f"last{depth}:{kind}": sum(self._widths[-depth:]) for kind, depth in self._depths.items()}

    def __call__(self, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Shape: {name: (B, width)} of `kept` -> {readout: (B, D)}."""
        return {
            name: torch.cat([self._piece(kept, *piece) for piece in pieces], dim=1)
            for name, pieces in self._pieces.items()
        }

    def _piece(self, kept: Mapping[str, Tensor], kind: str, back: int) -> Tensor:
        depth = self._depths[kind]
        widths = self._widths[-depth:]
        start = sum(widths[: depth - back])
        return kept[f"last{depth}:{kind}"][:, start : start + widths[depth - back]]


def _pieces(wanted: Readout) -> list[tuple[str, int]]:
    """Kind and block, 1 being the last, in the order in which a read-out concatenates them."""
    backs = range(wanted.num_blocks, 0, -1)
    if wanted.parts == "cls+mean_patch":
        return [*(("cls", back) for back in backs), ("mean_patch", 1)]
    return [(wanted.parts, back) for back in backs]
