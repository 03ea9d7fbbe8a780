"""Exact search: to the same bits in blocks, from float16, without one's own file, and with faiss absent."""

import logging
import sys

import pytest
import torch

from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.knn import backends, search
from nestling.ssl.evaluation.knn.backends import resolved
from nestling.ssl.evaluation.knn.exact import Exact, moments, spread, unit_rows

BACKENDS = ["faiss", "torch"]


def features(num_rows, seed, dim=24):
    return torch.randn(num_rows, dim, generator=torch.Generator().manual_seed(seed))


def test_products_of_unit_rows_are_the_same_in_whatever_order_they_are_added():
    rows, query = unit_rows(features(50, 0, 700)), unit_rows(features(1, 1, 700))
    products = rows.double() * query.double()
    forward, backward = products.cumsum(1)[:, -1], products.flip(1).cumsum(1)[:, -1]
    halves = products[:, 1::2].sum(1) + products[:, ::2].sum(1)
    assert torch.equal(forward, backward)
    assert torch.equal(forward, halves)
    assert torch.equal(forward, (rows.double() @ query.double().mT)[:, 0])
    assert (rows.double().norm(dim=1) - 1).abs().max() < 1e-6


def test_moments_of_parts_add_up_to_the_deviation_of_the_whole():
    rows = unit_rows(features(60, 2))
    parts = torch.stack([moments(part) for part in rows.split(7)]).sum(0)
    assert spread(parts) == pytest.approx(float(rows.double().std(dim=0, correction=0).max()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_never_finds_its_own_file_however_often_it_is_there(backend, monkeypatch):
    rows = unit_rows(features(40, 3))
    rows, files = torch.cat([rows, rows]), torch.arange(40).repeat(2)  # each file twice
    exact = Exact(rows, files, backend, num_own=2)
    queries, of_queries = rows[[3, 8]], torch.tensor([3, -1])  # the second one is another file
    every = queries.double() @ rows.double().mT
    every[0, [3, 43]] = -torch.inf
    expected = every.sort(dim=1, descending=True, stable=True)
    similarities, places = exact(queries, of_queries, 6)
    assert torch.equal(places, expected.indices[:, :6])
    assert torch.equal(similarities, expected.values[:, :6])
    assert places[1, :2].tolist() == [8, 48]
    # All that are left, then nothing; and the same where every similarity must be looked at.
    monkeypatch.setattr("nestling.ssl.evaluation.knn.exact.SPARE", 0)
    similarities, places = exact(queries, of_queries, 80)
    assert places[0].tolist() == [*expected.indices[0, :78].tolist(), -1, -1]
    assert similarities[0, 78:].tolist() == [-torch.inf] * 2
    constant = Exact(torch.ones_like(rows) / 5, files, backend, num_own=2)
    assert constant(queries, of_queries, 5)[1].tolist() == [[0, 1, 2, 4, 5], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_float16_rows_in_a_mapped_file_are_searched_block_by_block(backend, tmp_path, monkeypatch):
    rows, queries = unit_rows(features(90, 4)), unit_rows(features(9, 5))
    (tmp_path / "rows").write_bytes(rows.half().numpy().tobytes())
    mapped = torch.from_file(str(tmp_path / "rows"), size=90 * 24, dtype=torch.float16).view(90, 24)
    monkeypatch.setattr("nestling.ssl.evaluation.knn.exact.BLOCK", 13)
    similarities, places = Exact(mapped, None, backend)(queries, None, 7)
    kept = unit_rows(rows.half())
    assert (kept - rows).abs().max() < 2e-4
    expected = (queries.double() @ kept.double().mT).sort(dim=1, descending=True, stable=True)
    assert torch.equal(places, expected.indices[:, :7])
    assert torch.equal(similarities, expected.values[:, :7])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("order", ["nearer and nearer", "further and further", "in pairs"])
def test_blocks_in_any_order_give_a_sort_of_all(backend, order, monkeypatch):
    rows, queries = unit_rows(features(4000, 8)), unit_rows(features(70, 9))
    near = (rows @ queries[0]).argsort(descending=order == "further and further")
    rows = rows[near] if order != "in pairs" else rows[:2000].repeat(2, 1)
    monkeypatch.setattr("nestling.ssl.evaluation.knn.exact.BLOCK", 700)
    monkeypatch.setattr("nestling.ssl.evaluation.knn.backends.TILE", 700 * 16)
    similarities, places = Exact(rows, None, backend)(queries, None, 5)
    expected = (queries.double() @ rows.double().mT).sort(dim=1, descending=True, stable=True)
    assert torch.equal(places, expected.indices[:, :5])
    assert torch.equal(similarities, expected.values[:, :5])


def test_few_or_no_rows_leave_the_rest_empty():
    similarities, places = Exact(torch.empty(0, 4))(torch.eye(4), None, 2)
    assert places.tolist() == [[-1, -1]] * 4
    assert (similarities == -torch.inf).all()
    assert Exact(torch.eye(4))(torch.eye(4)[:1], None, 6)[1].tolist() == [[0, 1, 2, 3, -1, -1]]


def test_on_macos_faiss_has_one_thread(monkeypatch):
    with backends.faiss_on(3) as faiss:
        assert faiss.omp_get_max_threads() == 3
    monkeypatch.setattr(sys, "platform", "darwin")
    with backends.faiss_on(3) as faiss:
        assert faiss.omp_get_max_threads() == 1


def test_with_faiss_absent_the_neighbours_are_the_same_and_it_is_said_once(monkeypatch, caplog):
    train, test = features(300, 6), features(20, 7)
    expected = search(train, test, 9, "faiss")
    with caplog.at_level(logging.WARNING, "nestling"):
        assert resolved("auto") == "faiss"
        assert not caplog.records
        backends._say_absent.cache_clear()
        monkeypatch.setitem(sys.modules, "faiss", None)  # as if it were not installed
        for _ in range(2):
            found = search(train, test, 9)
            assert torch.equal(found[0], expected[0])
            assert torch.equal(found[1], expected[1])
    (record,) = caplog.records
    assert "faiss can't be imported" in record.getMessage()
    with pytest.raises(UserError, match=r"knn\.backend=faiss can't be used: .*; .*set knn\.backend=torch"):
        search(train, test, 9, "faiss")
    with pytest.raises(UserError, match=r"knn\.backend=annoy: choose auto, faiss or torch"):
        resolved("annoy")
