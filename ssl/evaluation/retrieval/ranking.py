"""How early a search finds what it should: mean average precision and precision of the first few.

Shapes used below: N images that are searched, Q queries.
"""

from collections.abc import Sequence

import numpy as np

from nestling.ssl.evaluation.retrieval.ground_truth import Query

KS = (1, 5, 10)
PROTOCOLS = {  # what counts as found and what is passed over (Radenovic et al., 2018, section 2.2)
    "easy": (("easy",), ("junk", "hard")),
    "medium": (("easy", "hard"), ("junk",)),
    "hard": (("hard",), ("junk", "easy")),
}


def average_precision(ranks: np.ndarray, num_positive: int) -> float:
    """The area under precision over recall, as trapezoids.

    With positives at the ranks r_0 < r_1 < … (from 0): sum over j of
    (j / r_j + (j + 1) / (r_j + 1)) / (2 num_positive), where 0 / 0 is 1. Positives that are not found add
    nothing. The definition of the Oxford, Paris and Holidays benchmarks; others take no trapezoids.
    """
    before = np.arange(len(ranks), dtype=np.float64)
    left = np.divide(before, ranks, out=np.ones(len(ranks)), where=ranks > 0)
    return float((left + (before + 1) / (ranks + 1)).sum() / (2 * num_positive))


def precision_at(ranks: np.ndarray, k: int) -> float:
    """The share of positives among the first k, or among all up to the last positive if those are fewer."""
    most = min(int(ranks.max()) + 1, k)
    return float((ranks < most).sum() / most)


def order(similarities: np.ndarray) -> np.ndarray:
    """Most similar first, equal ones by their place.

    Shape:
        (..., N) -> (..., N) int64
    """
    return np.argsort(-similarities, axis=-1, kind="stable")


def evaluate(
    similarities: np.ndarray, queries: Sequence[Query], unreadable: Sequence[int] = ()
) -> dict[str, float | None]:
    """mAP and mP@1, 5, 10 under each protocol: the mean over the queries that have a positive there.

    Images that couldn't be read are passed over. None where no query has a positive.

    Shape:
        similarities: (Q, N)
    """
    results: dict[str, float | None] = {}
    ranked = [order(row) for row in similarities]
    for protocol, (wanted, passed) in PROTOCOLS.items():
        scores = [
            found
            for ranking, query in zip(ranked, queries, strict=True)
            if (found := _scores(ranking, query, wanted, passed, unreadable)) is not None
        ]
        means = np.mean(scores, axis=0).tolist() if scores else [None] * (1 + len(KS))
        results |= dict(zip((f"{protocol}/map", *(f"{protocol}/mp{k}" for k in KS)), means, strict=True))
    return results


def _scores(
    ranking: np.ndarray, query: Query, wanted: Sequence[str], passed: Sequence[str], unreadable: Sequence[int]
) -> list[float] | None:
    """Average precision and the precisions of one query; None without a positive."""
    gone = np.asarray(unreadable, np.int64)
    positive = np.setdiff1d(np.concatenate([getattr(query, level) for level in wanted]), gone)
    if not len(positive):
        return None
    aside = np.concatenate([gone, *(getattr(query, level) for level in passed)])
    kept = ranking[~np.isin(ranking, aside)]
    ranks = np.flatnonzero(np.isin(kept, positive))
    return [average_precision(ranks, len(positive)), *(precision_at(ranks, k) for k in KS)]
