"""Neighbours among the rows of all processes, none of which holds another's: queries travel, rows stay.

Every process searches its own rows for each query; the k nearest of all are the nearest of the processes'
k nearest, in the same order, as similarities are exact and ties go to the smallest index of the dataset.

Shapes used below: M queries of all processes, k neighbours, Q queries at once, W processes, D channels.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nestling.ssl.distributed import everyones, is_distributed, is_main
from nestling.ssl.evaluation.features import gather_rows
from nestling.ssl.evaluation.knn.exact import ordered
from nestling.ssl.evaluation.knn.parts import Part

QUERIES = 1 << 13  # at once: the more, the less often rows are read from a disk

# Queries (Q, D), their files, k -> similarities (Q, k) float64, places in this process's rows (Q, k).
Local = Callable[[Tensor, Tensor | None, int], tuple[Tensor, Tensor]]


class Found(NamedTuple):
    """The nearest training images of each query, in the order of the dataset; empty beside the main process.

    Shape:
        queries: (M,), of the dataset; similarities: (M, k) float64; indices: (M, k), of the dataset, or -1
    """

    queries: Tensor
    similarities: Tensor
    indices: Tensor


def search_together(
    train: Tensor, queries: Part, k: int, local: Local, device: torch.device, at_once: int = QUERIES
) -> Found:
    """The k nearest of all processes' training rows for all processes' queries.

    `train (n,)` are the indices of the rows that `local` searches.
    """
    similarities, indices = [], []
    for process, count in enumerate(everyones([len(queries.indices)])):
        for start in range(0, count, at_once):
            num = min(at_once, count - start)
            mine = slice(start, start + num)
            rows = handed_round(queries.rows[mine], (num, queries.rows.shape[1]), process, device)
            files = queries.files
            if files is not None:
                files = handed_round(files[mine], (num,), process, device)
            found, places = local(rows, files, k)
            where = train[places.clamp(min=0)] if len(train) else places
            best = _merged(found, where.masked_fill(places < 0, -1), k, device)
            if is_main():
                similarities.append(best[0])
                indices.append(best[1])
    images = gather_rows(queries.indices, device)
    if not is_main() or not similarities:
        empty = torch.empty(0, k, dtype=torch.long)
        return Found(empty[:, 0], empty.double(), empty)
    order = images.argsort()
    return Found(images[order], torch.cat(similarities)[order], torch.cat(indices)[order])


def handed_round(rows: Tensor, shape: tuple[int, ...], process: int, device: torch.device) -> Tensor:
    """The rows of one process on all.

    Shape:
        rows: `shape` on that process, anything on the others -> `shape` on the CPU
    """
    if not is_distributed():
        return rows
    place = torch.device("cpu") if dist.get_backend() == "gloo" else device
    filled = rows.contiguous() if dist.get_rank() == process else rows.new_empty(shape)
    filled = filled.to(place)
    dist.broadcast(filled, src=process)
    return filled.cpu()


def _merged(similarities: Tensor, indices: Tensor, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The best of all processes, on the main one.

    Shape:
        (Q, k), (Q, k) of each process -> (Q, k), (Q, k)
    """
    if not is_distributed():
        return similarities, indices
    num = len(similarities)
    gathered = [gather_rows(part, device) for part in (similarities, indices)]
    if not is_main():
        return similarities[:0], indices[:0]
    one, other = (part.unflatten(0, (-1, num)).transpose(0, 1).flatten(1) for part in gathered)  # Q W*k
    return ordered(one, other, k)
