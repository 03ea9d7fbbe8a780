"""The compiled kernel (native/) for rows of logits on a CPU, its images shared among torch's threads.

A number per image or row comes back, and these are added in their order: results are the same for all numbers
of threads.

Shapes used below: T global views, n images of a block, G views of one crop size, K prototypes.
"""

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from nestling.backbones.kernels import PARALLEL, check_absent, has_torchs_threads

try:
    import nestling.ssl.terms.kernel as kernel
except ImportError as error:
    check_absent(error, "nestling.ssl.terms.kernel")
    kernel = None  # type: ignore[assignment]
else:
    kernel.use_threads(PARALLEL)

WORTH_A_THREAD = 2**18  # logits; fewer are done before another thread has begun


def takes(*tensors: Tensor) -> bool:
    """Whether the kernel is there and made for these: fp32 on a CPU, entries of a row side by side."""
    return all(tensor.dtype == torch.float32 for tensor in tensors) and takes_rows(*tensors)


def takes_rows(*tensors: Tensor) -> bool:
    """The same of logits and their gradients, which may also be bf16."""
    return kernel is not None and all(
        tensor.device.type == "cpu"
        and tensor.ndim > 0
        and tensor.dtype in (torch.float32, torch.bfloat16)
        and tensor.shape[-1] > 0
        and tensor.stride(-1) == 1
        for tensor in tensors
    )


def compare(
    groups: Sequence[tuple[Tensor, Tensor | None, int]],
    targets: Tensor,
    slope: Tensor,
    rescale: Tensor | None,
    weight: float,
) -> float:
    """The loss of `Comparison`, of groups of logits, gradient to be written, and first view.

    Shape:
        logits, gradient: (G, n, K)
        targets: (T, n, K)
        slope, rescale: (1,) or (K,)
    """
    losses = np.zeros(targets.shape[1])
    given = [(array(x), None if g is None else array(g), first) for x, g, first in groups]
    q, slopes = targets.detach().numpy(), slope.numpy()
    rescales = None if rescale is None else rescale.numpy()

    def work(start: int, end: int, threads: int) -> None:
        for logits, gradient, first in given:
            into = None if gradient is None else gradient[:, start:end]
            few = (logits[:, start:end], into, q[:, start:end])
            kernel.compare(*few, slopes, rescales, losses[start:end], first, weight, threads)

    share(work, targets.shape[1], sum(logits.numel() for logits, _, _ in groups))
    return math.fsum(losses)


def make_targets(logits: Tensor, bias: Tensor, slope: Tensor, q: Tensor) -> tuple[float, Tensor]:
    """q = softmax(bias + slope * logits); the sum of all entropies, and the largest entry of each row.

    Shape:
        logits, q: (T, n, K)
        bias, slope: (1,) or (K,)
        returns: (), (T * n,)
    """
    told = np.zeros((*logits.shape[:2], 2))
    given, out, factors = array(logits), q.numpy(), (bias.numpy(), slope.numpy())

    def work(start: int, end: int, threads: int) -> None:
        kernel.targets(given[:, start:end], *factors, out[:, start:end], told[:, start:end], threads)

    share(work, logits.shape[1], logits.numel())
    return math.fsum(told[..., 0].flat), torch.from_numpy(told[..., 1]).flatten().long()


def add_rows(total: Tensor, rows: Tensor) -> None:
    """total += all rows, shared by columns. Shape: (K,), (T, n, K)."""
    sums, given = total.numpy(), array(rows)

    def work(start: int, end: int, threads: int) -> None:
        kernel.add_rows(sums[start:end], given[..., start:end], threads)

    share(work, len(total), rows.numel())


def transpose(out: Tensor, rows: Tensor) -> None:
    """out = rows^T, both fp32 or bf16, shared by columns. Shape: (K, R), contiguous; (R, K)."""
    to, given = array(out), array(rows)

    def work(start: int, end: int, threads: int) -> None:
        kernel.transpose(to[start:end], given[:, start:end], threads)

    share(work, len(to), rows.numel())


def array(rows: Tensor) -> np.ndarray:
    """The same memory; NumPy has no bf16, which it sees as uint16."""
    rows = rows.detach()
    return (rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows).numpy()


def empty_like(tensor: Tensor, dtype: torch.dtype | None = None, is_filled: bool = False) -> Tensor:
    """As torch's, in pages that are faster to be written first where the system has them.

    `is_filled`: by this thread, for torch's threads, which wait for each other where they share a page.
    """
    made = torch.empty_like(tensor, dtype=dtype)
    if takes_rows(made) and made.is_contiguous():
        kernel.use_large_pages(array(made), is_filled)
    return made


def share(work: Callable[[int, int, int], None], number: int, num_logits: int) -> None:
    """Let all of `number` be worked on: by one call, given a number of threads, or by one for each thread."""
    threads = max(1, min(torch.get_num_threads(), number, num_logits // WORTH_A_THREAD))
    if threads == 1 or has_torchs_threads():
        work(0, number, threads)
        return
    ranges = list(pairwise(number * thread // threads for thread in range(threads + 1)))
    others = [pool(os.getpid(), threads - 1).submit(work, *few, 1) for few in ranges[1:]]
    work(*ranges[0], 1)
    for other in others:
        other.result()


@cache
def pool(process: int, threads: int) -> ThreadPoolExecutor:
    """One for each process, as a fork has no other threads than the one that forked."""
    return ThreadPoolExecutor(threads, thread_name_prefix="loss")
