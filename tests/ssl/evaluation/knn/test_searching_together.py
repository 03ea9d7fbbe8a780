"""Rows of several processes: searched where they are, merged to the bits that one process finds."""

import multiprocessing
import os

import pytest
import torch
import torch.distributed as dist

from nestling.ssl.evaluation.knn.exact import Exact, unit_rows
from nestling.ssl.evaluation.knn.parts import Part
from nestling.ssl.evaluation.knn.together import Found, search_together

NUM_TRAIN, NUM_TEST, K = 40, 11, 9


def sides():
    """Rows with copies, so that ties cross processes; some queries are training images."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(NUM_TRAIN // 4, 12, generator=generator).repeat(4, 1)
    queries = torch.cat([rows[:4], torch.randn(NUM_TEST - 4, 12, generator=generator)])
    files = torch.arange(NUM_TEST)
    files[4:] += NUM_TRAIN
    return (
        Part(torch.arange(NUM_TRAIN), unit_rows(rows), torch.arange(NUM_TRAIN)),
        Part(torch.arange(NUM_TEST), unit_rows(queries), files),
    )


def found_by(process, num_processes):
    """As one of several that take every so-many-th image; the last of three has no training image."""
    train, queries = sides()
    holders = min(num_processes, 2)
    mine = train.indices[process::holders] if process < holders else train.indices[:0]
    train, queries = train.at(mine), queries.at(queries.indices[process::num_processes])
    local = Exact(train.rows, train.files, "torch", 1, num_own=1)
    return search_together(train.indices, queries, K, local, torch.device("cpu"), at_once=2)


def work(process, num_processes, folder):
    store = dist.FileStore(f"{folder}/store", num_processes)
    dist.init_process_group("gloo", store=store, rank=process, world_size=num_processes)
    torch.save(tuple(found_by(process, num_processes)), f"{folder}/{process}.pt")
    dist.barrier()
    os._exit(0)  # without Python's shutdown, which gloo's threads may not survive


@pytest.mark.parametrize("num_processes", [2, 3])
def test_several_processes_find_to_the_bit_what_one_finds(num_processes, tmp_path):
    train, queries = sides()
    exact = Exact(train.rows, train.files, "faiss", 1, num_own=1)
    similarities, places = exact(queries.rows, queries.files, K)
    alone = found_by(0, 1)
    fork = multiprocessing.get_context("fork")
    children = [
        fork.Process(target=work, args=(rank, num_processes, tmp_path)) for rank in range(num_processes)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    for found in (alone, Found(*torch.load(tmp_path / "0.pt"))):
        assert torch.equal(found.queries, queries.indices)
        assert torch.equal(found.similarities, similarities)
        assert torch.equal(found.indices, places)
    assert not (places[:4] == torch.arange(4)[:, None]).any()
    assert all(len(part) == 0 for part in torch.load(tmp_path / "1.pt"))
