"""The comparison itself: fair turns, no timing of what differs, and figures that follow from the times."""

import ast
import importlib
import json
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch

PART = """
from side_by_side import Case

def cases(device, quick):
    yield Case("{}", "peer", *[list] * 3)
"""
CPU = torch.device("cpu")


@pytest.fixture
def scripts(repository, monkeypatch) -> Path:
    """The folder of the benchmarks, from which they import each other."""
    folder = repository / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture
def harness(scripts) -> ModuleType:
    return importlib.import_module("side_by_side")


class Calls(list):
    """Who was called, in order, as a case."""

    def case(self, harness, **settings):
        return harness.Case(
            "part",
            "peer",
            lambda: self.append("ours"),
            lambda: self.append("theirs"),
            lambda: self.append("check"),
            **settings,
        )


@pytest.mark.parametrize("warm_up", [True, False])
def test_both_take_turns_after_the_check_and_a_round_that_is_not_counted(harness, warm_up):
    calls = Calls()
    row = harness.compared(calls.case(harness, rounds=5, warm_up=warm_up), 1, CPU)
    assert calls[0] == "check"
    assert calls.count("check") == 1
    rounds = list(zip(calls[1::2], calls[2::2], strict=True))
    assert len(rounds) == 5 + warm_up
    assert all(set(each) == {"ours", "theirs"} for each in rounds)
    assert all(first[0] != second[0] for first, second in pairwise(rounds))
    assert row.memory_share is None


def test_what_a_side_needs_before_its_turn_is_not_timed(harness, monkeypatch):
    calls = Calls()

    def timed(call, device):
        calls.append("begin")
        call()
        return 1.0, 1.0

    monkeypatch.setattr(harness, "timed", timed)
    before = {f"before_{side}": lambda side=side: calls.append(f"for {side}") for side in ("ours", "theirs")}
    harness.compared(calls.case(harness, rounds=2, warm_up=False, **before), 1, CPU)
    turns = list(zip(calls[1::3], calls[2::3], calls[3::3], strict=True))
    assert sorted(turns) == [("for ours", "begin", "ours")] * 2 + [("for theirs", "begin", "theirs")] * 2


def test_what_does_not_compute_the_same_is_not_timed(harness):
    calls = Calls()

    def check():
        raise ValueError("3 of 5 numbers differ")

    case = harness.Case("part", "peer", *[lambda: calls.append("timed")] * 2, check)
    with pytest.raises(ValueError, match="3 of 5 numbers differ"):
        harness.compared(case, 1, CPU)
    assert not calls


def test_the_spread_is_the_median_between_its_quartiles(harness):
    spread = harness.spread([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (spread.low, spread.median, spread.high) == (2, 3, 4)
    assert str(spread) == "3000 ±1e+03"
    single = harness.spread([7.0])
    assert (single.low, single.median, single.high) == (7, 7, 7)


def test_ratios_in_the_file_and_the_table_are_those_of_the_medians(harness, tmp_path, capsys):
    options = harness.parser("").parse_args(
        ["--threads", "1", "--device", "cpu", "--json", str(tmp_path / "rows.json")]
    )

    def cases(device, quick):
        assert (device, quick) == (CPU, False)
        work = [lambda size=size: torch.ones(size, size).mm(torch.ones(size, size)) for size in (64, 256)]
        yield harness.Case("products", "larger ones", *work, check=list, at_least=2, rounds=3)

    (row,) = harness.measured({"one": cases}, options)
    content = json.loads((tmp_path / "rows.json").read_text())
    assert content["machine"]["torch"] == torch.__version__
    (record,) = content["rows"]
    assert (record["part"], record["peer"], record["threads"], record["at_least"]) == (
        "products",
        "larger ones",
        1,
        2,
    )
    for clock in ("cpu", "wall"):
        ratio = record[f"theirs_{clock}"]["median"] / record[f"ours_{clock}"]["median"]
        assert record[f"{clock}_ratio"] == ratio == getattr(row, f"{clock}_ratio")
    assert record["misses"] == (record["wall_ratio"] < 2)
    *_, shown, verdict = capsys.readouterr().out.splitlines()
    assert verdict == f"{int(record['misses'])} of 1 rows miss what is asked of them"
    assert shown == harness.line(row.cells())
    assert f"{record['wall_ratio']:.2f} x" in shown


def test_memory_is_what_tensors_take_at_their_peak_and_not_what_was_held(harness):
    held = torch.ones(1 << 22)

    def call():
        torch.ones(1 << 20).add_(1)  # 4 MB of float32, let go of
        first = held[: 1 << 20] + 1
        return first + first  # 4 MB more beside the first

    assert harness.tensors_at_peak(call, CPU) == pytest.approx(2 << 22, rel=1e-3)
    case = harness.Case("part", "peer", call, lambda: torch.ones(1 << 22), list, most_memory=0.4, rounds=1)
    row = harness.compared(case, 1, CPU)
    assert row.memory_share == pytest.approx(0.5, rel=1e-3)
    assert row.misses


def test_only_the_parts_that_are_asked_for_are_run(scripts, tmp_path, monkeypatch, capsys):
    bench = importlib.import_module("bench")
    for name in ("part_one", "part_two"):
        (tmp_path / f"{name}.py").write_text(PART.format(name))
    (tmp_path / "part_that_must_not_be_read.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(bench, "PARTS", ("part_one", "part_that_must_not_be_read", "part_two"))
    monkeypatch.setattr(
        sys, "argv", ["bench.py", "--only", "part_two", "part_one", "--threads", "1", "--device", "cpu"]
    )
    bench.main()
    rows = capsys.readouterr().out.splitlines()[2:-1]
    assert [row.split()[0] for row in rows] == ["part_two", "part_one"]
    monkeypatch.setattr(sys, "argv", ["bench.py", "--only", "nonsense"])
    with pytest.raises(SystemExit):
        bench.main()
    assert "nonsense" in capsys.readouterr().err


def test_every_part_is_a_script_with_cases_and_a_docstring(scripts):
    bench = importlib.import_module("bench")
    for name in bench.PARTS:
        script = ast.parse((scripts / f"{name}.py").read_text())
        assert f"{name}.py" in (ast.get_docstring(script) or ""), name
        (cases,) = [
            part for part in script.body if isinstance(part, ast.FunctionDef) and part.name == "cases"
        ]
        assert len(cases.args.args) == 2, name  # the device, and whether to be quick
