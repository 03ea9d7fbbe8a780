"""Masks: PNG files whose pixels are class ids, read as they stand and never resampled between ids.

Shapes used below: H x W pixels.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, UnidentifiedImageError

from nestling.ssl.data.decoding.quiet import quiet
from nestling.ssl.errors import UserError
from nestling.ssl.names import printable

IGNORED = 255
MODES = ("1", "L", "P")
GRAY, DEPTH_AT, COLOUR_AT = 0, 24, 25  # in the header of a PNG
PROBLEMS = (OSError, SyntaxError, ValueError, UnidentifiedImageError, Image.DecompressionBombError)


def read_mask(path: str | Path) -> np.ndarray:
    """The ids of a gray or palette PNG of at most 8 bits.

    Shape:
        -> (H, W) uint8

    Raises:
        UserError: it can't be read, or is no such PNG.
    """
    try:
        with Path(path).open("rb") as file:
            header = file.read(COLOUR_AT + 1)
        with quiet(), Image.open(path) as image:
            kind, mode = image.format, image.mode
            ids = np.array(image, np.uint8) if kind == "PNG" and mode in MODES else None
    except PROBLEMS as error:
        raise UserError(f"the mask {printable(path)} can't be read: {error}") from error
    if ids is None:
        raise UserError(
            f"the mask {printable(path)} is {kind} of mode {mode}; a mask is a gray or palette PNG of at "
            f"most 8 bits whose pixels are class ids, {IGNORED} where there is none"
        )
    if header[COLOUR_AT] == GRAY and header[DEPTH_AT] in (2, 4):
        ids //= 255 // (2 ** header[DEPTH_AT] - 1)  # Pillow spreads gray of few bits over 0 to 255
    return ids


def mask_size(path: str | Path) -> tuple[int, int]:
    """Height and width, from the header.

    Raises:
        UserError: it can't be read.
    """
    try:
        with quiet(), Image.open(path) as image:
            return image.height, image.width
    except PROBLEMS as error:
        raise UserError(f"the mask {printable(path)} can't be read: {error}") from error


def write_mask(path: Path, ids: np.ndarray, palette: Sequence[int]) -> None:
    """A palette PNG, as the DAVIS toolkit and image viewers read it.

    Shape:
        ids: (H, W) uint8; palette: red, green, blue of each id in turn
    """
    image = Image.fromarray(ids)
    image.putpalette(list(palette))
    image.save(path, format="PNG")


def resized_ids(ids: np.ndarray, height: int, width: int) -> np.ndarray:
    """The id at the centre of each new pixel: no id comes up that was not there.

    Shape:
        (H, W) uint8 -> (height, width) uint8
    """
    whole = torch.from_numpy(np.array(ids))[None, None]
    return np.asarray(F.interpolate(whole, (height, width), mode="nearest-exact")[0, 0])
