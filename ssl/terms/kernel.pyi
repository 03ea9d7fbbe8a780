"""Compiled from the C files in native/, where a compiler was there when the package was installed."""

import numpy as np

def use_threads(address: int) -> None:
    """That of GOMP_parallel; without it `threads` below only divides the work, in one thread."""

def targets(
    logits: np.ndarray, bias: np.ndarray, slope: np.ndarray, q: np.ndarray, told: np.ndarray, threads: int
) -> None:
    """q = softmax(bias + slope * logits); `told`, float64 (T, n, 2), gets entropy and winner of each row.

    `logits` are fp32, or bf16 seen as uint16, here and below.

    Shape:
        logits, q: (T, n, K); bias, slope: (K,) or (1,)
    """

def compare(
    logits: np.ndarray,
    gradients: np.ndarray | None,
    targets: np.ndarray,
    slope: np.ndarray,
    rescale: np.ndarray | None,
    losses: np.ndarray,
    first: int,
    weight: float,
    threads: int,
) -> None:
    """The views of one crop size, of which the first is student view `first`.

    `losses`, float64 (n,), is added to; `gradients`, fp32 or bf16 too, may be `logits`.

    Shape:
        logits, gradients: (G, n, K); targets: (T, n, K); slope, rescale: (K,) or (1,)
    """

def add_rows(total: np.ndarray, rows: np.ndarray, threads: int) -> None:
    """total += all rows. Shape: (K,), (T, n, K)."""

def transpose(out: np.ndarray, rows: np.ndarray, threads: int) -> None:
    """out = rows^T, both of one type. Shape: (K, R), contiguous; (R, K)."""

def use_large_pages(array: np.ndarray, is_filled: bool) -> None:
    """For contiguous memory that is new, where the system has such pages; filled by this thread if asked."""
