"""What vector of an image is judged: by name, from one forward pass for all of them.

Shapes used below: B images, D channels of a block.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nestling.backbones import Backbone, Features
from nestling.ssl.errors import UserError

FORMS = "cls, mean_patch or cls+mean_patch, and lastN: before it for the last N blocks, such as last4:cls"
_NAME = re.compile(r"(?:last([1-9]\d?):)?(cls|mean_patch|cls\+mean_patch)")


@dataclass(frozen=True)
class Readout:
    """One way from the last blocks to a vector.

    `cls` concatenates the class tokens of the last blocks, `mean_patch` the means of their patches;
    `cls+mean_patch` the class tokens, then the mean patch of the last block alone, as DINOv2's probe does.
    """

    name: str
    num_blocks: int
    parts: str

    def __call__(self, blocks: Sequence[Features]) -> Tensor:
        """Shape: the Features of at least `num_blocks` last blocks -> (B, sum of the D it takes) float32."""
        used = blocks[-self.num_blocks :]
        if self.parts == "mean_patch":
            return torch.cat([block.patches.float().mean(1) for block in used], dim=1)
        vectors = [block.cls.float() for block in used]
        if self.parts == "cls+mean_patch":
            vectors.append(used[-1].patches.float().mean(1))
        return torch.cat(vectors, dim=1)


def readout(name: str) -> Readout:
    """The read-out of that name.

    Raises:
        UserError: there is none.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise UserError(f"{name} is no read-out of a backbone; there are {FORMS}")
    return Readout(name, int(match[1] or 1), match[2])


def last_blocks(backbone: Backbone, images: Tensor, readouts: Sequence[Readout]) -> list[Features]:
    """As many last blocks as the read-outs take.

    Raises:
        UserError: the network has, or shows, fewer.
    """
    count = max(wanted.num_blocks for wanted in readouts)
    try:
        return [backbone(images)] if count == 1 else backbone.last_blocks(images, count)
    except ValueError as error:
        names = ", ".join(wanted.name for wanted in readouts if wanted.num_blocks > 1)
        if not names:
            raise
        raise UserError(f"{names}: {error}") from error
