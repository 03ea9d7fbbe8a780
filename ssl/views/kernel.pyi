"""Compiled from the C files in native/, where a compiler was there when the package was installed."""

import numpy as np

def render(
    image: np.ndarray,
    shape: tuple[int, ...],
    box: tuple[int, int, int, int],
    size: int,
    flip: bool,
    order: bytes,
    factors: tuple[float, float, float, float],
    is_gray: bool,
    sigma: float,
    threshold: int,
    out: np.ndarray,
) -> None:
    """All of a view; contiguous arrays of bytes, sigma 0: no blur, threshold 256: nothing is inverted."""
