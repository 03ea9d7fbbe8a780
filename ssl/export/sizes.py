"""Sizes of images at which an exported network is compared, in pixels."""

import math

from nestling.backbones import Backbone
from nestling.backbones.swin import Swin, WindowAttention
from nestling.backbones.vit import ViT

Size = tuple[int, int]  # height, width


def unit(backbone: Backbone) -> int:
    """Pixels by which sides may grow: 1, or the patch in a family that takes whole patches only."""
    side = 4 * backbone.stride * backbone.min_size + 1
    try:
        backbone.check_size(side, side)
    except ValueError:
        return backbone.stride
    return 1


def two_sizes(backbone: Backbone, side: int) -> list[Size]:
    """A square of about `side` pixels, and a larger size: not square, nor of whole patches if it may."""
    stride = backbone.stride
    side = -(-side // stride) * stride
    odd = stride // 2 if unit(backbone) == 1 else 0
    return [(side, side), (side + stride, side + 2 * stride + odd)]


def table_side(backbone: ViT) -> int | None:
    """The side of the images that the learned table of positions was made for; None without one."""
    if backbone.pos_embed is None:
        return None
    return math.isqrt(backbone.pos_embed.shape[1] - 1) * backbone.stride


def whole_windows(backbone: Swin, side: int) -> int:
    """The smallest side from `side` up whose last grid is whole windows: nothing is padded there."""
    window = max(part.window for part in backbone.modules() if isinstance(part, WindowAttention))
    pixels = backbone.stride * window
    return -(-side // pixels) * pixels
