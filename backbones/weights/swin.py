"""Swin's published files and EsViT's: the names our Swin carries.

Both hold buffers that follow from the shapes (`attn_mask`, `relative_position_index`), and where the
network was built for images whose last maps are smaller than the window, smaller bias tables there.
Swin's own code refuses sizes that its windows don't divide, so our default, masked padding, is as
right for its files as any; EsViT, and iBOT after it, let padded tokens be attended.
"""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from nestling.backbones.weights.layout import Converted, rename, take

BUFFERS = r".*\.(attn_mask|relative_position_index)|attn_mask|relative_position_index"
TABLE = ".relative_position_bias_table"


def convert(tensors: dict[str, Tensor], is_esvit: bool) -> Converted:
    """Our keys from published ones."""
    is_ibot = "masked_embed" in tensors
    tensors = rename(tensors, [(r"masked_embed$", "mask_token")])
    left_out = take(tensors, BUFFERS)
    if "mask_token" in tensors:
        tensors["mask_token"] = tensors["mask_token"].reshape(1, 1, -1)
    notes = widen_tables(tensors)
    layout = "iBOT Swin" if is_ibot else "EsViT" if is_esvit else "Swin"
    padding = "masked" if layout == "Swin" else "attended"
    return Converted("swin", layout, tensors, {"padding": padding}, left_out, notes)


def widen_tables(tensors: dict[str, Tensor]) -> list[str]:
    """Lay smaller bias tables in the middle of tables for the largest window; says so in a note.

    The middle holds the same offsets, so maps no larger than the small window read the same numbers;
    further offsets, which were never trained, read 0. Raises ValueError for windows that differ by
    design, as those of Swin's search for sizes (S3) do.
    """
    keys = [key for key in tensors if key.startswith("layers.") and key.endswith(TABLE)]
    largest = max((math.isqrt(len(tensors[key])) for key in keys), default=0)
    _check_windows([(int(key.split(".")[1]), (math.isqrt(len(tensors[key])) + 1) // 2) for key in keys])
    smaller = [key for key in keys if math.isqrt(len(tensors[key])) < largest]
    for key in smaller:
        tensors[key] = resize_table(tensors[key], (largest + 1) // 2)
    if not smaller:
        return []
    return [
        f"{len(smaller)} bias tables of a window smaller than {(largest + 1) // 2} lie in the middle of "
        "larger ones: maps larger than their window read 0 beyond it"
    ]


def _check_windows(found: list[tuple[int, int]]) -> None:
    """A window below the largest must be its stage's whole map, so half of it is the next stage's.

    `found` are pairs of a stage and a window.
    """
    stages = sorted(set(found))
    windows = [window for _, window in stages]
    largest = max(windows, default=0)
    for before, after in pairwise(windows):
        half = (before // 2, (before + 1) // 2)
        if after not in half if before < largest else after < half[1]:
            break
    else:
        if len(stages) == len(dict(stages)):
            return
    raise ValueError(
        f"the windows of these tables, by stage, are {windows}, which differ by more than maps too small for "
        "the largest explain; a swin here has one window, create('timm:...') has others"
    )


def resize_table(table: Tensor, window: int) -> Tensor:
    """The bias table of another window: the middle of the larger, or zeros around the smaller.

    Shape:
        table: ((2m - 1)^2, H) -> ((2M - 1)^2, H)
    """
    old, new = math.isqrt(len(table)), 2 * window - 1
    if old >= new:
        start = (old - new) // 2
        return table.unflatten(0, (old, old))[start : start + new, start : start + new].flatten(0, 1)
    wide = torch.zeros(new, new, table.shape[1], dtype=table.dtype)
    start = (new - old) // 2
    wide[start : start + old, start : start + old] = table.unflatten(0, (old, old))
    return wide.flatten(0, 1)


def add_tables(tensors: dict[str, Tensor], options: Mapping[str, Any]) -> None:
    """Bias tables of zeros where the network has none, for libraries whose Swin can't go without."""
    if options["position"] in ("relative", "both"):
        return
    for key in [key for key in tensors if key.endswith(".attn.proj.weight")]:
        heads = options["num_heads"] << int(key.split(".")[1])
        table = tensors[key].new_zeros((2 * options["window"] - 1) ** 2, heads)
        tensors[key.removesuffix(".proj.weight") + TABLE] = table
