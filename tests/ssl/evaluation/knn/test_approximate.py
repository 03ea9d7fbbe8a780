"""Approximate indexes: near the truth, honest about how near, and exact in what they return."""

import sys

import pytest
import torch

from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.knn import backends
from nestling.ssl.evaluation.knn.approximate import Approximate, recall, refuse_without_faiss
from nestling.ssl.evaluation.knn.exact import Exact, unit_rows
from nestling.ssl.evaluation.knn.together import Found


def clustered(num_rows, seed):
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(60, 16, generator=torch.Generator().manual_seed(0))
    return unit_rows(centers[torch.arange(num_rows) % 60] + torch.randn(num_rows, 16, generator=generator))


def found_by(search, queries, files, k):
    return Found(torch.arange(len(queries)), *search(queries, files, k))


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_most_neighbours_are_found_with_exact_similarities_and_their_recall_is_told(kind):
    rows, files = clustered(4000, 1), torch.arange(4000)
    queries, own = torch.cat([rows[:50], clustered(50, 2)]), torch.cat([files[:50], -torch.ones(50)]).long()
    index = Approximate(rows, kind, files, num_threads=1, num_own=1)
    near, exact = (found_by(s, queries, own, 10) for s in (index, Exact(rows, files, "faiss", 1, 1)))
    assert not (near.indices[:50] == files[:50, None]).any()
    shares = recall(near, exact, [1, 10])
    by_hand = [
        len({*a} & {*b}) / 10 for a, b in zip(near.indices.tolist(), exact.indices.tolist(), strict=True)
    ]
    assert shares["recall_k10"] == pytest.approx(sum(by_hand) / 100)
    assert 0.5 < shares["recall_k10"] < 1 or kind == "hnsw"
    assert shares["recall_k10"] > 0.5
    there = near.indices >= 0
    scored = (queries.double()[:, None] * rows.double()[near.indices.clamp(min=0)]).sum(-1)
    assert torch.equal(near.similarities[there], scored[there])
    assert (near.similarities.diff(dim=1) <= 0).all()


def test_the_recall_is_of_the_queries_that_were_searched_exactly():
    near = Found(torch.tensor([3, 5, 9]), torch.zeros(3, 2), torch.tensor([[1, 2], [3, 4], [5, -1]]))
    exact = Found(torch.tensor([3, 9]), torch.zeros(2, 2), torch.tensor([[2, 7], [5, 6]]))
    assert recall(near, exact, [1, 2]) == {"recall_k1": 0.5, "recall_k2": 0.5}


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_few_rows_or_none_are_no_problem(kind):
    assert Approximate(torch.eye(4)[:3], kind)(torch.eye(4)[:1], None, 5)[1].tolist()[0][0] == 0
    assert Approximate(torch.empty(0, 4), kind)(torch.eye(4)[:1], None, 2)[1].tolist() == [[-1, -1]]


def test_an_index_of_faiss_without_faiss_is_refused(monkeypatch, caplog):
    with pytest.raises(UserError, match=r"knn\.index=ivf is an index of faiss, but knn\.backend is torch"):
        refuse_without_faiss("ivf", "torch")
    refuse_without_faiss("flat", "torch")
    refuse_without_faiss("ivf", "auto")
    monkeypatch.setitem(sys.modules, "faiss", None)  # as if it were not installed
    backends._say_absent.cache_clear()
    with pytest.raises(UserError, match=r"knn\.index=hnsw is an index of faiss"):
        refuse_without_faiss("hnsw", "auto")
    assert not caplog.records, "not that torch finds the same"
