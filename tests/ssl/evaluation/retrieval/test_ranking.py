"""mAP against the definition written out, and what is passed over."""

import numpy as np
import pytest

from nestling.ssl.evaluation.retrieval.ground_truth import Query
from nestling.ssl.evaluation.retrieval.ranking import average_precision, evaluate

PROTOCOLS = {"easy": ("e", "jh"), "medium": ("eh", "j"), "hard": ("h", "je")}


def scores_as_written(similarities, kinds, wanted, passed):
    """One walk down the list: the trapezoid between the precision before and after each positive."""
    total = sum(kind in wanted for kind in kinds)
    seen = found = 0
    area, hits = 0.0, []
    for place in sorted(range(len(kinds)), key=lambda place: (-similarities[place], place)):
        if kinds[place] in passed:
            continue
        hit = kinds[place] in wanted
        hits.append(hit)
        if hit:
            before = 1.0 if seen == 0 else found / seen
            found += 1
            area += (before + found / (seen + 1)) / 2 / total
        seen += 1
    last = max(number for number, hit in enumerate(hits) if hit) + 1
    precisions = [sum(hits[: min(last, k)]) / min(last, k) for k in (1, 5, 10)]
    return [area, *precisions]


def test_all_protocols_equal_the_walk_down_the_list():
    random = np.random.default_rng(0)
    kinds = [random.choice(list("ehj."), 30, p=[0.1, 0.2, 0.2, 0.5]) for _ in range(6)]
    kinds[5][kinds[5] == "e"] = "."  # a query without easy positives: not in the mean of that protocol
    similarities = random.normal(size=(6, 30)).round(1)  # with ties
    queries = [
        Query(str(number), None, *(np.flatnonzero(kind == letter) for letter in "ehj"))
        for number, kind in enumerate(kinds)
    ]
    results = evaluate(similarities, queries)
    for name, (wanted, passed) in PROTOCOLS.items():
        asked = [number for number in range(6) if any(letter in wanted for letter in kinds[number])]
        assert len(asked) == (5 if name == "easy" else 6)
        scores = [scores_as_written(similarities[number], kinds[number], wanted, passed) for number in asked]
        found = [results[f"{name}/{measure}"] for measure in ("map", "mp1", "mp5", "mp10")]
        assert found == pytest.approx(np.mean(scores, axis=0).tolist())


def test_known_values_of_the_trapezoids():
    assert average_precision(np.array([0, 1, 2]), 3) == 1
    assert average_precision(np.array([1]), 1) == pytest.approx(0.25)  # (0 / 1 + 1 / 2) / 2
    assert average_precision(np.array([0]), 2) == pytest.approx(0.5)  # the other is never found
    assert average_precision(np.array([], np.int64), 2) == 0


def test_unreadable_images_are_passed_over_and_no_positive_gives_none():
    empty = np.array([], np.int64)
    query = Query("q", None, np.array([2, 0]), empty, empty)
    results = evaluate(np.array([[0.1, 0.9, 0.5]]), [query], unreadable=[0, 1])
    assert results["easy/map"] == results["easy/mp1"] == 1
    assert results["hard/map"] is None
