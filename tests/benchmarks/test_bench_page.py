"""The table that a page of docs shows of measured rows."""

import importlib

import pytest


@pytest.fixture
def table(repository, monkeypatch):
    """What `markdown` makes of rows, its lines of cells."""
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    page = importlib.import_module("page")

    def made(*rows):
        lines = page.markdown({"machine": {"cpu": "a CPU"}, "rows": rows}).splitlines()[4:]
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]

    return made


def row(ratio, threads=1, at_least=None, share=None, most=None):
    told = {"part": "loss", "peer": "loop", "threads": threads, "wall_ratio": ratio, "at_least": at_least}
    return {**told, "memory_share": share, "most_memory": most}


def test_both_numbers_of_threads_stand_in_one_line(table):
    assert table(row(2.0), row(1.5, threads=2)) == [["loss", "loop", "", "2.00x", "1.50x", ""]]
    assert table(row(1.5, threads=2)) == [["loss", "loop", "", "", "1.50x", ""]]


def test_time_that_misses_and_memory_that_misses_are_told_apart(table):
    met = row(3.0, at_least=3, share=0.3, most=0.3)
    assert table(met) == [["loss", "loop", "3x", "3.00x", "", "0.30x"]]
    slow = row(2.9, threads=2, at_least=3, share=0.3, most=0.3)
    assert table(met, slow) == [["loss", "loop", "3x, missed", "3.00x", "2.90x", "0.30x"]]
    large = row(3.0, at_least=3, share=0.31, most=0.3)
    assert table(large) == [["loss", "loop", "3x", "3.00x", "", "0.31x, 0.30x asked"]]
