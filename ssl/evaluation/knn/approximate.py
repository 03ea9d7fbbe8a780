"""Approximate neighbours for tens of millions of rows, by faiss, and how many of the true ones they are.

What an approximate index misses is not missed at random, so the accuracy is biased: its recall is measured
and told beside it.

Shapes used below: n rows of this process, M queries, D channels, k neighbours.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.knn.backends import faiss_on, why_absent
from nestling.ssl.evaluation.knn.exact import BLOCK, SPARE, loaded, nothing, settled
from nestling.ssl.evaluation.knn.together import Found

INDEXES = ("flat", "ivf", "hnsw")
FEWEST = 40  # rows per list that faiss asks for to place the lists well
PER_LIST = 64  # rows that the lists are placed by
PROBED = 16  # one list in so many is looked at
LINKS, WIDTH = 32, 128  # of HNSW: links per row, and how many rows it keeps in view


class Approximate:
    """Finds near ones of some unit rows through an index, which holds them as float16 in memory.

    IVF (Jégou et al., 2011, section IV) sorts rows into about 4 sqrt(n) lists and looks at a sixteenth of
    them; HNSW (Malkov and Yashunin, 2018) walks a graph. What they find is scored and ordered exactly, as
    in `Exact`, without rows of a query's own file.
    """

    def __init__(
        self,
        rows: Tensor,
        kind: str,
        files: Tensor | None = None,
        num_threads: int | None = None,
        num_own: int = 0,
    ) -> None:
        self.rows, self.files, self.num_own, self.num_threads = rows, files, num_own, num_threads
        if not len(rows):
            return
        with faiss_on(num_threads) as faiss:
            self._index = _index(faiss, rows, kind)
            for start in range(0, len(rows), BLOCK):
                self._index.add(loaded(rows[start : start + BLOCK]).numpy())

    def __call__(self, queries: Tensor, files: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
        """As `Exact` does.

        Shape:
            queries: (M, D), files: (M,) -> similarities (M, k) float64, places (M, k)
        """
        if not len(self.rows) or not len(queries):
            return nothing(len(queries), k)
        count = min(k + SPARE + self.num_own, len(self.rows))
        with faiss_on(self.num_threads) as faiss:
            if isinstance(self._index, faiss.IndexHNSW):
                self._index.hnsw.efSearch = max(WIDTH, 2 * count)
            _, places = self._index.search(queries.numpy(), count)
        candidates = torch.from_numpy(places)  # -1 where the index found fewer
        similarities, best, _ = settled(self.rows, queries, candidates, k, self.files, files)
        return similarities, best


def _index(faiss: Any, rows: Tensor, kind: str) -> Any:
    """An empty index, trained where its kind needs that."""
    dim, half = rows.shape[1], faiss.ScalarQuantizer.QT_fp16
    if kind == "hnsw":
        index = faiss.IndexHNSWSQ(dim, half, LINKS, faiss.METRIC_INNER_PRODUCT)
        index.train(loaded(rows[:1]).numpy())  # which float16 needs in name alone
        return index
    num_lists = max(1, min(round(4 * math.sqrt(len(rows))), len(rows) // FEWEST))
    index = faiss.IndexIVFScalarQuantizer(
        faiss.IndexFlatIP(dim), dim, num_lists, half, faiss.METRIC_INNER_PRODUCT
    )
    index.cp.min_points_per_centroid = 1  # of few rows faiss would complain on its own
    index.nprobe = max(1, math.ceil(num_lists / PROBED))
    wanted = min(len(rows), PER_LIST * num_lists)
    index.train(loaded(rows[torch.arange(wanted) * len(rows) // wanted]).numpy())
    return index


def refuse_without_faiss(kind: str, backend: str) -> None:
    """Raise UserError where an index that faiss alone has is to be searched by torch, `backend` as given."""
    if kind != "flat" and (backend == "torch" or (backend == "auto" and why_absent() is not None)):
        raise UserError(
            f"knn.index={kind} is an index of faiss, but knn.backend is torch here; set knn.index=flat, or "
            "install faiss-cpu and leave knn.backend at auto"
        )


def recall(found: Found, exact: Found, ks: Sequence[int]) -> dict[str, float]:
    """For each k the share of a query's k nearest that were found, on average over the queries of `exact`."""
    rows = torch.searchsorted(found.queries, exact.queries)
    result = {}
    for k in ks:
        ours, theirs = found.indices[rows, :k], exact.indices[:, :k]
        there = theirs >= 0
        hit = (theirs[:, :, None] == ours[:, None]).any(dim=2) & there
        result[f"recall_k{k}"] = float((hit.sum(1) / there.sum(1).clamp(min=1)).double().mean())
    return result
