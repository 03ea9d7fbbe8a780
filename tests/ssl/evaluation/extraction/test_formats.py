"""Every kind of file gives back what was written, block by block, and vectors of any length are found."""

import tracemalloc

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from nestling.ssl.evaluation.extraction import formats
from nestling.ssl.evaluation.extraction.formats import Column, unit, vectors, write
from nestling.ssl.evaluation.extraction.searching import nearest
from nestling.ssl.evaluation.knn import search

ROWS = np.random.default_rng(0).normal(size=(23, 6)).astype(np.float32)


NAMES = (lambda image: ["/a/plain.png", "/a/\udcff\nline.png"][image % 2], lambda image: None, {"a": [1]})


def column(rows: np.ndarray, pooling: str = "cls") -> Column:
    """In blocks of four and an empty one, as a part gives whose images are all unreadable."""

    def blocks():
        for start in range(0, len(rows), 4):
            yield np.arange(start, min(start + 4, len(rows))), rows[start : start + 4]
            yield np.arange(0), rows[:0]

    return Column(pooling, rows.shape, rows.dtype, blocks, *NAMES)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("kind", ["npy", "safetensors", "parquet", "faiss"])
def test_what_is_written_is_read_in_blocks(kind, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "BLOCK_BYTES", 5 * 6 * 4)
    rows, path = ROWS.astype(dtype), tmp_path / f"cls.{kind}"
    write(kind, column(rows), path)
    blocks = [np.array(block) for block in vectors(path, kind)]
    assert max(map(len, blocks)) <= 5
    expected = unit(rows) if kind == "faiss" else rows
    assert np.array_equal(np.concatenate(blocks), expected)
    assert [file.name for file in tmp_path.iterdir()] == [f"cls.{kind}"]


def test_other_programs_read_npy_and_safetensors_of_a_grid(tmp_path):
    grid = ROWS[:20].reshape(5, 2, 2, 6).astype(np.float16)
    for kind in ("npy", "safetensors"):
        write(kind, column(grid, "patches"), tmp_path / f"patches.{kind}")
    assert np.array_equal(np.load(tmp_path / "patches.npy", mmap_mode="r"), grid)
    assert np.array_equal(load_file(tmp_path / "patches.safetensors")["features"], grid)


@pytest.mark.parametrize("kind", ["npy", "safetensors"])
def test_writing_holds_one_block_in_memory(kind, tmp_path):
    block = np.ones((512, 256), np.float32)  # 0.5 MB of 16 MB
    many = Column(
        "cls",
        (32 * 512, 256),
        block.dtype,
        lambda: ((np.arange(512), block.copy()) for _ in range(32)),
        *NAMES,
    )
    tracemalloc.start()
    write(kind, many, tmp_path / "file")
    assert tracemalloc.get_traced_memory()[1] < 3 * block.nbytes
    tracemalloc.stop()
    assert sum(float(rows.sum()) for rows in vectors(tmp_path / "file", kind)) == 32 * block.size


def test_unit_leaves_zero_rows_and_the_callers_array():
    rows = np.array([[3.0, 4.0], [0.0, 0.0]], np.float32)
    assert unit(rows).tolist() == [[np.float32(0.6), np.float32(0.8)], [0, 0]]
    assert rows.tolist() == [[3, 4], [0, 0]]


@pytest.mark.parametrize("k", [1, 5, 40])
def test_nearest_over_blocks_is_the_search_of_all_at_once(k):
    rows = np.concatenate([ROWS, ROWS[::-1]])  # every row twice: ties across blocks
    blocks = (rows[start : start + 7] for start in range(0, len(rows), 7))
    similarities, found = nearest(blocks, ROWS[4] * 3, k)
    exact, expected = search(torch.from_numpy(rows), torch.from_numpy(ROWS[4:5]), min(k, len(rows)))
    assert torch.equal(found, expected[0])
    torch.testing.assert_close(similarities, exact[0])
