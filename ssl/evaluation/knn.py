"""Weighted k-nearest-neighbour classification of frozen features (Wu et al., 2018; DINO, section 4.1).

Shapes used below: N training images, M test images, D feature channels, k neighbours, C classes.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from nestling.ssl.errors import UserError

log = logging.getLogger("nestling")

SPARE = 16  # candidates fetched beyond k, so that rounding and ties at the k-th place can be settled
TILE = 1 << 24  # similarities held at once: 64 MB in float32
CONSTANT = 1e-6  # below this standard deviation all features point the same way


def knn(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    ks: Sequence[int],
    temperature: float = 0.07,
    num_classes: int | None = None,
    backend: str = "faiss",
    num_threads: int | None = 1,
) -> dict[str, float]:
    """Shares of test images whose class the nearest training images vote for; one search for all k.

    A neighbour votes for its class with weight exp(cosine / temperature). Neighbours of equal
    similarity rank by smallest index, classes of equal votes by smallest class, and a class without
    a vote is never among the five. A k above N becomes N, and is said once.

    Returns `top1_k20`, …, named by the k that was used, and with more than five classes `top5_k20`.
    See `search` for `backend` and `num_threads`. The caller's tensors stay as they are.

    Shape:
        features: (N, D) and (M, D), any float type; labels: (N,) and (M,), integers in [0, C)

    Raises:
        UserError: non-finite features, labels outside [0, C), an empty side, sizes that differ.
    """
    train_labels, test_labels = train_labels.detach().cpu().long(), test_labels.detach().cpu().long()
    if num_classes is None:
        num_classes = 1 + max(
            (int(labels.max()) for labels in (train_labels, test_labels) if len(labels)), default=0
        )
    _check_labels(train_labels, len(train_features), num_classes, "training")
    _check_labels(test_labels, len(test_features), num_classes, "test")
    ks = effective_ks(ks, len(train_labels))
    similarities, indices = search(train_features, test_features, max(ks), backend, num_threads)
    results = {}
    for k in ks:
        top = _rank_classes(similarities[:, :k], indices[:, :k], train_labels, temperature, num_classes)
        right = top == test_labels[:, None]
        results[f"top1_k{k}"] = right[:, 0].double().mean().item()
        if num_classes > 5:  # with five classes or fewer it would say nothing
            results[f"top5_k{k}"] = right.any(1).double().mean().item()
    return results


def effective_ks(ks: Sequence[int], num_train: int) -> list[int]:
    """The k that can be used with that many training images, each once, in the order given."""
    if not ks or min(ks) < 1:
        raise UserError(f"knn.k={list(ks)}: give at least one number of neighbours, each 1 or more")
    if max(ks) > num_train:
        _say_clamped(max(ks), num_train)
    return list(dict.fromkeys(min(k, num_train) for k in ks))


@cache  # online k-NN asks at every evaluation: say it once
def _say_clamped(k: int, num_train: int) -> None:
    log.warning("k-NN: there are only %d training images, so k=%d becomes k=%d", num_train, k, num_train)


def _check_labels(labels: Tensor, num_images: int, num_classes: int, side: str) -> None:
    if num_images == 0:
        raise UserError(f"k-NN needs at least one {side} image and found none")
    if labels.shape != (num_images,):
        raise UserError(f"k-NN: {num_images} {side} features but labels of shape {tuple(labels.shape)}")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= num_classes:
        raise UserError(f"k-NN: {side} labels reach from {low} to {high}, outside 0 to {num_classes - 1}")


def _rank_classes(
    similarities: Tensor, indices: Tensor, train_labels: Tensor, temperature: float, num_classes: int
) -> Tensor:
    """Classes by votes, best first, at most five, padded with -1.

    Shape:
        similarities, indices: (M, k); train_labels: (N,) -> (M, min(C, 5))
    """
    found = indices >= 0
    labels = train_labels[indices.clamp(min=0)]  # M k
    # Dividing all weights of a query by the largest changes no rank and cannot overflow.
    logits = (similarities.double() - similarities[:, :1].double()) / temperature
    weights = logits.exp() * found
    top = []
    rows = max(1, TILE // num_classes)
    for label, weight, mask in zip(labels.split(rows), weights.split(rows), found.split(rows), strict=True):
        votes = weight.new_zeros(len(label), num_classes).scatter_add_(1, label, weight)
        voters = weight.new_zeros(len(label), num_classes).scatter_add_(1, label, mask.double())
        votes[voters == 0] = -1  # not the votes: a faint one may underflow to zero
        best = votes.sort(dim=1, descending=True, stable=True)
        top.append(best.indices.masked_fill(best.values < 0, -1)[:, :5])
    return torch.cat(top)


def search(
    train_features: Tensor, test_features: Tensor, k: int, backend: str = "faiss", num_threads: int | None = 1
) -> tuple[Tensor, Tensor]:
    """The k training features of largest cosine similarity to each test feature, exactly.

    Candidates come from float32 products, by `faiss` (IndexFlatIP) or by `torch` (a tiled matrix
    product); they are then scored and ordered in float64, equal ones by smallest index, so that
    both backends return the same. Cost: N * M * D.

    faiss runs on `num_threads` threads (None: as many as torch): after a search on several, a
    process that forks, such as a data loader's parent, may hang its children, hence 1. The thread
    counts of faiss and torch are put back.

    Shape:
        train_features: (N, D), test_features: (M, D) -> similarities (M, k) float32, indices (M, k)

    Raises:
        UserError: non-finite features, unequal D, k outside [1, N], an unknown backend.
    """
    if backend not in ("faiss", "torch"):
        raise UserError(f"knn.backend={backend}: choose faiss or torch")
    if train_features.shape[1:] != test_features.shape[1:] or train_features.ndim != 2:
        shapes = f"{tuple(train_features.shape)} and {tuple(test_features.shape)}"
        raise UserError(f"k-NN: features of shape {shapes} cannot be compared")
    if not 1 <= k <= len(train_features):
        raise UserError(
            f"k-NN: k={k} of {len(train_features)} training images; give 1 to {len(train_features)}"
        )
    train, test = _normalized(train_features, "training"), _normalized(test_features, "test")
    if train.std(dim=0, correction=0).max() < CONSTANT and len(train) > 1:
        log.warning("k-NN: features are constant (std < %g): the network has collapsed", CONSTANT)
    num_candidates = min(k + SPARE, len(train))
    if backend == "faiss":
        candidates = _candidates_of_faiss(train, test, num_candidates, num_threads)
    else:
        candidates = _candidates_of_torch(train, test, num_candidates)
    return _settle(train, test, candidates, k)


def _normalized(features: Tensor, side: str) -> Tensor:
    """A float32 copy on the CPU with rows of length one (a zero row stays zero)."""
    copy = features.detach().to("cpu", torch.float32)
    finite = copy.isfinite().all(dim=1)
    if not finite.all():
        bad = (~finite).nonzero().flatten().tolist()
        more = f" and {len(bad) - 10} more" if len(bad) > 10 else ""
        shown = ", ".join(map(str, bad[:10]))
        raise UserError(f"k-NN: {side} features hold NaN or infinity for the images of index {shown}{more}")
    return F.normalize(copy, dim=1, eps=1e-30).contiguous()


@contextmanager
def _restored_threads() -> Iterator[None]:
    """Put back the thread counts of faiss and torch, which can share one OpenMP runtime."""
    torch_threads = torch.get_num_threads()
    import faiss

    faiss_threads = faiss.omp_get_max_threads()
    try:
        yield
    finally:
        faiss.omp_set_num_threads(faiss_threads)
        torch.set_num_threads(torch_threads)  # last: faiss's call may have changed it


def _candidates_of_faiss(train: Tensor, test: Tensor, num_candidates: int, num_threads: int | None) -> Tensor:
    threads = torch.get_num_threads() if num_threads is None else num_threads
    with _restored_threads():
        import faiss

        faiss.omp_set_num_threads(threads)
        index = faiss.IndexFlatIP(train.shape[1])
        index.add(train.numpy())
        _, indices = index.search(test.numpy(), num_candidates)
    return torch.from_numpy(indices)


def _candidates_of_torch(train: Tensor, test: Tensor, num_candidates: int) -> Tensor:
    """Keep the best of tile after tile of training rows.

    Shape:
        train: (N, D), test: (M, D) -> (M, num_candidates)
    """
    columns = max(num_candidates, 8192)
    found = []
    for queries in test.split(max(1, TILE // columns)):
        best = queries.new_empty(len(queries), 0)
        indices = torch.empty(len(queries), 0, dtype=torch.long)
        for start in range(0, len(train), columns):
            tile = queries @ train[start : start + columns].mT
            places = torch.arange(start, start + tile.shape[1]).expand(len(queries), -1)
            best, indices = torch.cat([best, tile], dim=1), torch.cat([indices, places], dim=1)
            best, order = best.topk(min(num_candidates, best.shape[1]), dim=1)
            indices = indices.gather(1, order)
        found.append(indices)
    return torch.cat(found)


def _settle(train: Tensor, test: Tensor, candidates: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Score candidates in float64 and order them; where rounding hides which k belong, look at all.

    Shape:
        train: (N, D), test: (M, D), candidates: (M, k + spare) -> (M, k), (M, k)
    """
    num_candidates, dim = candidates.shape[1], train.shape[1]
    missing = (candidates < 0).any(dim=1)
    candidates = candidates.clamp(min=0).sort(dim=1).values
    rounding = math.sqrt(dim) * 2.0**-24  # of a float32 product of unit vectors, about
    similarities, indices, unsure = [], [], []
    rows = max(1, TILE // (num_candidates * dim))
    for queries, places in zip(test.split(rows), candidates.split(rows), strict=True):
        # Not a matrix product: there, equal rows can differ in the last bit with their place in the tile.
        exact = (queries.double()[:, None] * train[places].double()).sum(dim=-1)  # m k+spare
        best = exact.sort(dim=1, descending=True, stable=True)
        similarities.append(best.values[:, :k])
        indices.append(places.gather(1, best.indices[:, :k]))
        unsure.append(best.values[:, k - 1] - best.values[:, -1] <= 2 * rounding)
    similarity, index = torch.cat(similarities), torch.cat(indices)
    open_rows = missing | (torch.cat(unsure) & (num_candidates < len(train)))
    if open_rows.any():
        similarity[open_rows], index[open_rows] = _search_all(train, test[open_rows], k)
    return similarity.clamp(-1, 1).float(), index


def _search_all(train: Tensor, test: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """All similarities in float64, one per distinct training row, so that copies tie exactly.

    Shape:
        train: (N, D), test: (M, D) -> (M, k), (M, k)
    """
    distinct, copy_of = torch.unique(train, dim=0, return_inverse=True)
    distinct = distinct.double()
    similarities, indices = [], []
    for queries in test.double().split(max(1, TILE // (2 * len(train)))):
        every = (queries @ distinct.mT)[:, copy_of]  # m N
        last = every.topk(k, dim=1).values[:, -1:]
        above, equal = every > last, every == last
        room = k - above.sum(dim=1, keepdim=True)
        chosen = above | (equal & (equal.cumsum(dim=1) <= room))
        places = chosen.nonzero()[:, 1].view(-1, k)  # by index
        best = every.gather(1, places).sort(dim=1, descending=True, stable=True)
        similarities.append(best.values)
        indices.append(places.gather(1, best.indices))
    return torch.cat(similarities), torch.cat(indices)
