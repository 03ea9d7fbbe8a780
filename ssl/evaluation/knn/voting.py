"""Weighted votes of the nearest neighbours (Wu et al., 2018; DINO, section 4.1).

Shapes used below: N training images, M test images, D feature channels, k neighbours, C classes.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.knn.exact import search

log = logging.getLogger("nestling")

VOTES = 1 << 24  # held at once: 128 MB in float64
TOP = 5


def knn(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    ks: Sequence[int],
    temperature: float = 0.07,
    num_classes: int | None = None,
    backend: str = "auto",
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
    ranked = ranked_classes(similarities, indices, train_labels, ks, temperature, num_classes)
    return shares_right(ranked, test_labels, num_classes)


def effective_ks(ks: Sequence[int], num_train: int) -> list[int]:
    """The k that can be used with that many training images, each once, in the order given."""
    if not ks or min(ks) < 1:
        raise UserError(f"knn.k={list(ks)}: give at least one number of neighbours, each 1 or more")
    if max(ks) > num_train:
        _say_clamped(clamping(ks, num_train), num_train)
    return clamped(ks, num_train)


def clamped(ks: Sequence[int], num_train: int) -> list[int]:
    """The same without a word."""
    return list(dict.fromkeys(min(k, num_train) for k in ks))


def clamping(ks: Sequence[int], most: int) -> str:
    """What becomes of those above `most`, as in k=50, k=99 become k=24."""
    above = [f"k={k}" for k in dict.fromkeys(ks) if k > most]
    return f"{', '.join(above)} become{'s' * (len(above) == 1)} k={most}"


@cache  # online k-NN asks at every evaluation: say it once
def _say_clamped(what: str, num_train: int) -> None:
    log.warning("k-NN: there are only %d training images, so %s", num_train, what)


def _check_labels(labels: Tensor, num_images: int, num_classes: int, side: str) -> None:
    if num_images == 0:
        raise UserError(f"k-NN needs at least one {side} image and found none")
    if labels.shape != (num_images,):
        raise UserError(f"k-NN: {num_images} {side} features but labels of shape {tuple(labels.shape)}")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= num_classes:
        raise UserError(f"k-NN: {side} labels reach from {low} to {high}, outside 0 to {num_classes - 1}")


def ranked_classes(
    similarities: Tensor,
    indices: Tensor,
    train_labels: Tensor,
    ks: Sequence[int],
    temperature: float,
    num_classes: int,
) -> dict[int, Tensor]:
    """For each k the classes by votes, best first, at most five, padded with -1.

    Neighbours of index -1 don't vote.

    Shape:
        similarities, indices: (M, largest k); train_labels: (N,) -> {k: (M, min(C, 5))}
    """
    rows = max(1, VOTES // num_classes)
    parts = [
        _ranked(similarity, index, train_labels, sorted(ks), temperature, num_classes)
        for similarity, index in zip(similarities.split(rows), indices.split(rows), strict=True)
    ]
    return {k: torch.cat([part[k] for part in parts]) for k in ks}


def _ranked(
    similarities: Tensor,
    indices: Tensor,
    train_labels: Tensor,
    rising: Sequence[int],
    temperature: float,
    num_classes: int,
) -> dict[int, Tensor]:
    """The same for some rows: each k adds its neighbours to the votes of the one before."""
    found = indices >= 0
    labels = train_labels[indices.clamp(min=0)].masked_fill(~found, num_classes)  # m k; one class for none
    # Dividing all weights of a query by the largest changes no rank and cannot overflow.
    logits = (similarities.double() - similarities[:, :1].double()) / temperature
    weights = logits.exp().masked_fill(~found, 0)
    votes = weights.new_zeros(len(labels), num_classes + 1)
    voted = torch.zeros_like(votes, dtype=torch.bool)  # not the votes: a faint one may underflow to zero
    ranked = {}
    for k, before in zip(rising, (0, *rising), strict=False):
        votes.scatter_add_(1, labels[:, before:k], weights[:, before:k])
        voted.scatter_(1, labels[:, before:k], True)
        ranked[k] = _first(votes.masked_fill(~voted, -1)[:, :num_classes])
    return ranked


def _first(votes: Tensor) -> Tensor:
    """The classes of most votes, of equal ones the smallest first; -1 for those of -1.

    Shape:
        votes: (m, C), changed -> (m, min(C, 5))
    """
    top = []
    for _ in range(min(votes.shape[1], TOP)):
        best = votes.max(dim=1, keepdim=True)  # the first of equal ones
        top.append(best.indices.masked_fill(best.values < 0, -1))
        votes.scatter_(1, best.indices, -1)
    return torch.cat(top, dim=1)


def shares_right(ranked: Mapping[int, Tensor], test_labels: Tensor, num_classes: int) -> dict[str, float]:
    """`top1_k20`, … of the ranked classes; `top5_k20` where there are more than five."""
    results = {}
    for k, top in ranked.items():
        right = top == test_labels[:, None]
        results[f"top1_k{k}"] = right[:, 0].double().mean().item()
        if num_classes > TOP:  # with five classes or fewer it would say nothing
            results[f"top5_k{k}"] = right.any(1).double().mean().item()
    return results
