"""From a batch of images to the rows that are written: each read-out's vectors, and the grid of patches.

Shapes used below: B images of S pixels a side, C channels, D features, an h x w grid.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from nestling.ssl.data.channels import channels, normalisation
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.readouts import last_blocks, readout
from nestling.ssl.names import printable
from nestling.ssl.trained import Trained
from nestling.ssl.views.render import normalize

GRID = "patches"
DTYPES = {"float32": torch.float32, "float16": torch.float16}
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SHOWN = 10  # images that a message names


class Forward:
    """uint8 images -> {pooling: rows}, without gradients.

    Raises:
        UserError: an unknown pooling; when called, more last blocks than the network has.
    """

    def __init__(
        self,
        trained: Trained,
        poolings: Sequence[str],
        side: int,
        dtype: str = "float32",
        precision: str = "fp32",
        device: torch.device | str = "cpu",
    ) -> None:
        self.device, self.dtype, self.autocast = torch.device(device), DTYPES[dtype], PRECISIONS[precision]
        self.mean, self.std = normalisation(trained.config.data)
        self.backbone = trained.backbone.to(self.device)
        self.poolings = list(dict.fromkeys(poolings))
        self.readouts = [readout(name) for name in self.poolings if name != GRID]
        self._blank = (1, channels(trained.config.data), side, side)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of one row: (D,) of vectors, (h, w, D) of `patches`; costs one image."""
        return {name: rows.shape[1:] for name, rows in self(torch.zeros(self._blank)).items()}

    @torch.no_grad()
    def __call__(self, images: Tensor) -> dict[str, np.ndarray]:
        """Shape: (B, C, S, S) uint8 -> {pooling: (B, D) or (B, h, w, D)}"""
        pixels = normalize(images.to(self.device, non_blocking=True), self.mean, self.std)
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            blocks = last_blocks(self.backbone, pixels, self.readouts or [readout("cls")])
        rows = {wanted.name: wanted(blocks) for wanted in self.readouts}
        if GRID in self.poolings:
            rows[GRID] = blocks[-1].patches.unflatten(1, blocks[-1].grid)
        return {name: rows[name].to(self.dtype).cpu().numpy() for name in self.poolings}


def refuse_not_finite(rows: dict[str, np.ndarray], names: Sequence[str]) -> None:
    """Raise UserError where a row holds NaN or infinity, naming the images; `names` are the rows' images."""
    for pooling, values in rows.items():
        finite = np.isfinite(values).reshape(len(values), -1).all(axis=1)
        if not finite.all():
            bad = [printable(name) for name, good in zip(names, finite, strict=True) if not good]
            more = f" and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
            hint = "; beyond 65504 dtype=float16 has none, use float32" if values.dtype == np.float16 else ""
            raise UserError(
                f"{pooling} holds NaN or infinity for {', '.join(bad[:SHOWN])}{more}: the weights are "
                f"damaged or their training diverged{hint}"
            )
