"""k-NN accuracies at k = 10, 20, 100 and 200: ours and one search per k.

    python benchmarks/knn.py [--threads 1 2] [--quick] [--json FILE] [--device cuda]

The peer is our own plain statement of DINO's evaluation: per k, a hundred queries at a time, their
similarity to all training rows, topk, labels, a weighted vote. Votes are added where they belong; the
original multiplies one-hot rows, which takes longer. faiss is its `IndexFlatIP`, also with one search per k.
All predict the same classes. The largest case runs once, as it takes minutes; ours searches on the CPU
whatever the device.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from side_by_side import Case, main
from torch import Tensor

from nestling.ssl.evaluation.knn.backends import faiss_on
from nestling.ssl.evaluation.knn.exact import search
from nestling.ssl.evaluation.knn.voting import ranked_classes

KS = (10, 20, 100, 200)
TEMPERATURE = 0.07
WIDTH, CLASSES = 384, 1000
CHUNK = 100  # queries of the peer at once, as with 10,000 in a hundred chunks
CHECKED = 500  # queries that are compared
NOISE = 3.3  # of a feature around its class's centre: about half are then told right

Predict = Callable[["Sides"], dict[int, Tensor]]  # {k: (M,)}


@dataclass(frozen=True)
class Sides:
    """Shape: train (N, D), labels (N,), queries (M, D)."""

    train: Tensor
    labels: Tensor
    queries: Tensor

    @classmethod
    def drawn(cls, num_train: int, num_queries: int, device: torch.device) -> "Sides":
        """Noisy class centres."""
        generator = torch.Generator().manual_seed(0)
        centres = torch.randn(CLASSES, WIDTH, generator=generator)
        kinds = torch.randint(CLASSES, (num_train + num_queries,), generator=generator)
        rows = NOISE * torch.randn(len(kinds), WIDTH, generator=generator) + centres[kinds]
        train, queries = rows.to(device).split([num_train, num_queries])
        return cls(train, kinds[:num_train].to(device), queries)


def ours(sides: Sides, backend: str) -> dict[int, Tensor]:
    """What `nestling.ssl.evaluation.knn.knn` does before it counts."""
    similarities, indices = search(sides.train, sides.queries, max(KS), backend, num_threads=None)
    ranked = ranked_classes(similarities, indices, sides.labels.cpu(), KS, TEMPERATURE, CLASSES)
    return {k: classes[:, 0] for k, classes in ranked.items()}


def by_matrix_products(sides: Sides) -> dict[int, Tensor]:
    """A search per k, in chunks."""
    rows, queries = F.normalize(sides.train), F.normalize(sides.queries)
    predicted = {}
    for k in KS:
        found = [(chunk @ rows.mT).topk(k) for chunk in queries.split(CHUNK)]
        predicted[k] = torch.cat([voted(*best, sides.labels) for best in found])
    return predicted


def by_faiss(sides: Sides) -> dict[int, Tensor]:
    """A search per k, by faiss itself."""
    rows, queries = F.normalize(sides.train).cpu().numpy(), F.normalize(sides.queries).cpu().numpy()
    labels, predicted = sides.labels.cpu(), {}
    with faiss_on(None) as faiss:
        index = faiss.IndexFlatIP(WIDTH)
        index.add(rows)
        for k in KS:
            predicted[k] = voted(*map(torch.from_numpy, index.search(queries, k)), labels)
    return predicted


def voted(similarities: Tensor, places: Tensor, labels: Tensor) -> Tensor:
    """The class of most votes.

    Shape:
        (m, k), (m, k), (N,) -> (m,)
    """
    votes = similarities.new_zeros(len(similarities), CLASSES)
    return votes.scatter_add_(1, labels[places], (similarities / TEMPERATURE).exp()).argmax(dim=1)


def check(sides: Sides, our: Predict, their: Predict) -> None:
    """Raise where a prediction differs."""
    few = Sides(sides.train, sides.labels, sides.queries[:CHECKED])
    found, expected = our(few), their(few)
    for k in KS:
        differ = int((found[k] != expected[k].cpu()).sum())
        if differ:
            raise ValueError(f"k={k}: {differ} of {len(few.queries)} predictions differ")


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """The size asked for, once, and a smaller one with all peers."""
    small, full = ((1000, 100), (2000, 200)) if quick else ((50_000, 1000), (200_000, 10_000))
    backends = ("torch", "faiss")
    peers: list[tuple[str, Predict]] = [
        ("one search per k, torch", by_matrix_products),
        ("one search per k, faiss", by_faiss),
    ]
    for size, chosen, rounds in ((small, backends, 3), (full, backends[:1], 1)):
        sides = Sides.drawn(*size, device)
        for backend in chosen:
            for peer, their in peers[: len(chosen)]:
                our = partial(ours, backend=backend)
                yield Case(
                    part=f"k-NN {size[0]} x {size[1]} x {WIDTH}, {backend}",
                    peer=peer,
                    ours=partial(our, sides),
                    theirs=partial(their, sides),
                    check=partial(check, sides, our, their),
                    at_least=4 if size == full else None,
                    rounds=rounds,
                    warm_up=rounds > 1,
                )


if __name__ == "__main__":
    main(cases, __doc__)
