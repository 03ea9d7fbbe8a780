"""Who multiplies: faiss (IndexFlatIP) or torch (a matrix product), by name.

faiss runs on `num_threads` threads (None: as many as torch): after a search on several, a process that forks,
such as a data loader's parent, may hang its children, so it is 1 where training goes on. The thread counts
of faiss and torch, which can share one OpenMP runtime, are put back. On macOS, where the two bring a runtime
each, it is always 1.

Shapes used below: R training rows, M queries, D channels, c nearest rows.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.knn.largest import GROUP, joined, largest

log = logging.getLogger("nestling")

BACKENDS = ("auto", "faiss", "torch")
TILE = 1 << 23  # similarities held at once, 32 MB in float32: about what a processor's cache holds

# (R, D) and (M, D) float32, c, floor (M,) -> similarities (M, w) float32, places (M, w), w <= c. A floor, if
# any, is what c rows seen before reach: what is not above it may be left out, -inf in its place.
Nearest = Callable[[Tensor, Tensor, int, Tensor | None], tuple[Tensor, Tensor]]


def resolved(backend: str) -> str:
    """What `auto` means here: faiss, and torch with a warning where faiss can't be imported.

    Raises:
        UserError: an unknown name, or `faiss` where it can't be imported.
    """
    if backend not in BACKENDS:
        raise UserError(f"knn.backend={backend}: choose auto, faiss or torch")
    if backend == "torch":
        return backend
    problem = why_absent()
    if problem is None:
        return "faiss"
    if backend == "faiss":
        raise UserError(
            f"knn.backend=faiss can't be used: {problem}; install faiss-cpu, or set knn.backend=torch, "
            "which finds the same neighbours"
        )
    _say_absent(problem)
    return "torch"


def why_absent() -> str | None:
    """Why faiss can't be imported; None where it can."""
    try:
        import faiss  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: a library of its own that can't be loaded
        return str(error) or type(error).__name__
    return None


@cache  # online k-NN asks at every evaluation: say it once
def _say_absent(problem: str) -> None:
    log.warning("k-NN: faiss can't be imported (%s), so torch finds the same neighbours", problem)


def row_searcher(backend: str, num_threads: int | None) -> Nearest:
    """The function that finds the rows of largest product with each query, in any order among equals."""
    if backend == "torch":
        return _by_torch

    def by_faiss(rows: Tensor, queries: Tensor, count: int, floor: Tensor | None) -> tuple[Tensor, Tensor]:
        with faiss_on(num_threads) as faiss:
            index = faiss.IndexFlatIP(rows.shape[1])
            index.add(rows.numpy())
            values, places = index.search(queries.numpy(), count)
        assert (places >= 0).all(), "faiss finds as many rows as there are, if all are finite"
        return torch.from_numpy(values), torch.from_numpy(places)

    return by_faiss


@contextmanager
def faiss_on(num_threads: int | None) -> Iterator[Any]:
    """faiss on that many threads; the thread counts of faiss and torch come back."""
    torch_threads = torch.get_num_threads()
    import faiss

    faiss_threads = faiss.omp_get_max_threads()
    threads = torch_threads if num_threads is None else num_threads
    try:
        faiss.omp_set_num_threads(1 if sys.platform == "darwin" else threads)
        yield faiss
    finally:
        faiss.omp_set_num_threads(faiss_threads)
        torch.set_num_threads(torch_threads)  # last: faiss's call may have changed it


def _by_torch(rows: Tensor, queries: Tensor, count: int, floor: Tensor | None) -> tuple[Tensor, Tensor]:
    at_once = max(1, TILE // len(rows))
    width = -(-len(rows) // GROUP) * GROUP
    tile = queries.new_full((min(at_once, len(queries)), width), -torch.inf)
    found = []
    for start in range(0, len(queries), at_once):
        some = slice(start, start + at_once)
        part = tile[: len(queries[some])]
        torch.mm(queries[some], rows.mT, out=part[:, : len(rows)])
        found.append(largest(part, count, None if floor is None else floor[some]))
    return joined(found)
