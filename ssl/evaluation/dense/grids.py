"""The patch tokens of the last blocks as maps, which is all that dense evaluations see of a backbone.

Shapes used below: B images, D channels of all blocks together, an h x w grid.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nestling.backbones import Backbone
from nestling.ssl.errors import UserError


def token_maps(backbone: Backbone, pixels: Tensor, num_blocks: int = 1) -> Tensor:
    """The normalised patch tokens of the last `num_blocks` blocks, concatenated.

    Blocks of a coarser grid, as those of Swin's later stages, are enlarged to the finest one.

    Shape:
        pixels: (B, C, H, W), normalised -> (B, D, h, w) float32

    Raises:
        UserError: the network has, or shows, fewer blocks.
    """
    try:
        blocks = [backbone(pixels)] if num_blocks == 1 else backbone.last_blocks(pixels, num_blocks)
    except ValueError as error:
        if num_blocks == 1:
            raise
        raise UserError(f"blocks={num_blocks}: {error}") from error
    maps = [block.patches.float().mT.unflatten(2, block.grid) for block in blocks]
    finest = max((block.grid for block in blocks), key=lambda grid: grid[0] * grid[1])
    return torch.cat([enlarged(part, finest) for part in maps], dim=1)


def enlarged(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """Bilinear, corners not aligned; as it is where it has that size already.

    Shape:
        maps: (B, D, h, w) -> (B, D, *size)
    """
    if maps.shape[2:] == size:
        return maps
    return F.interpolate(maps, size, mode="bilinear", align_corners=False)
