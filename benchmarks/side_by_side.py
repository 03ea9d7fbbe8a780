"""Ours and a peer in one process, taking turns: medians of process CPU time and wall time, and their ratio.

Both must compute the same first. Absolute times mean nothing on a shared machine, so every round calls
both, in alternating order, and the ratio is of medians. On a GPU the wall time is told after the device has
finished, and CPU time is what the host spent.
"""

import argparse
import gc
import itertools
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from nestling.ssl import allocator
from nestling.ssl.distributed import usable_cpus
from nestling.ssl.run.directory import processor

HEADER = ("part", "peer", "threads", "ours, ms", "peer, ms", "CPU ratio", "wall ratio", "memory", "asked")
WIDTHS = (46, 34, 7, 18, 18, 9, 10, 10, 12)


def nothing() -> None:
    pass


@dataclass(frozen=True)
class Case:
    """What is compared: `check` raises where the two don't compute the same.

    `at_least` is the ratio of peer to ours that is asked for, `most_memory` the largest share of the peer's
    memory at the peak; with it, memory is measured too. `before_ours` and `before_theirs` are called before
    each turn and not timed.
    """

    part: str
    peer: str
    ours: Callable[[], object]
    theirs: Callable[[], object]
    check: Callable[[], object]
    at_least: float | None = None
    most_memory: float | None = None
    rounds: int = 15
    warm_up: bool = True
    before_ours: Callable[[], object] = nothing
    before_theirs: Callable[[], object] = nothing


Cases = Callable[[torch.device, bool], Iterator[Case]]  # (device, whether to be small and quick)


@dataclass(frozen=True)
class Spread:
    """Median and quartiles, in seconds."""

    low: float
    median: float
    high: float

    def __str__(self) -> str:
        half = 500 * (self.high - self.low)
        return f"{1000 * self.median:.4g} " + (f"±{half:.2g}" if half else "(once)")


@dataclass(frozen=True)
class Row:
    """One case on a number of threads; ratios are peer over ours, `memory_share` ours over peer."""

    part: str
    peer: str
    threads: int
    ours_cpu: Spread
    ours_wall: Spread
    theirs_cpu: Spread
    theirs_wall: Spread
    at_least: float | None
    memory_share: float | None
    most_memory: float | None

    @property
    def cpu_ratio(self) -> float:
        return self.theirs_cpu.median / self.ours_cpu.median

    @property
    def wall_ratio(self) -> float:
        return self.theirs_wall.median / self.ours_wall.median

    @property
    def misses(self) -> bool:
        """Whether it is slower or takes more memory than is asked for."""
        if self.at_least is not None and self.wall_ratio < self.at_least:
            return True
        if self.memory_share is None or self.most_memory is None:
            return False
        return self.memory_share > self.most_memory

    def cells(self) -> list[str]:
        """What the table shows; the times are wall times."""
        share = "" if self.memory_share is None else f"{self.memory_share:.2f} x"
        asked = ("" if self.at_least is None else f"{self.at_least:g} x") + (" missed" if self.misses else "")
        ratios = [f"{ratio:.2f} x" for ratio in (self.cpu_ratio, self.wall_ratio)]
        times = [str(self.ours_wall), str(self.theirs_wall)]
        return [self.part, self.peer, str(self.threads), *times, *ratios, share, asked]

    def record(self) -> dict[str, object]:
        """For JSON."""
        ratios = {"cpu_ratio": self.cpu_ratio, "wall_ratio": self.wall_ratio}
        return {**asdict(self), **ratios, "misses": self.misses}


def compared(case: Case, threads: int, device: torch.device) -> Row:
    """Check once, warm both up where a case asks for it, then let them take turns."""
    torch.set_num_threads(threads)
    case.check()
    share = memory_share(case, device) if case.most_memory is not None else None
    calls = {"ours": case.ours, "theirs": case.theirs}
    before = {"ours": case.before_ours, "theirs": case.before_theirs}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for number in range(-case.warm_up, case.rounds):  # round -1 is warm-up
        for name in sorted(calls, reverse=number % 2 == 1):
            before[name]()
            took = timed(calls[name], device)
            if number >= 0:
                times[name].append(took)
    spreads = [spread(list(column)) for name in calls for column in zip(*times[name], strict=True)]
    return Row(case.part, case.peer, threads, *spreads, case.at_least, share, case.most_memory)


def timed(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """CPU and wall seconds of one call, its garbage included."""
    finish(device)
    cpu, wall = time.process_time(), time.perf_counter()
    call()
    finish(device)
    return time.process_time() - cpu, time.perf_counter() - wall


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def spread(times: Sequence[float]) -> Spread:
    """Shape: at least one number."""
    if len(times) == 1:
        return Spread(times[0], times[0], times[0])
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return Spread(low, median, high)


def memory_share(case: Case, device: torch.device) -> float:
    """Our tensors at their peak over the peer's."""
    ours, theirs = (tensors_at_peak(call, device) for call in (case.ours, case.theirs))
    return ours / theirs


def tensors_at_peak(call: Callable[[], object], device: torch.device) -> int:
    """Bytes that a call's tensors take at the peak, beyond those that were held before it.

    Resident memory differs from call to call on a CPU, by up to twice, as the heap has other gaps to fill.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    return max(itertools.accumulate(change for _, change in changes))


def line(cells: Sequence[str]) -> str:
    """Fixed columns, as rows come one by one."""
    return " ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


def machine(device: torch.device) -> dict[str, object]:
    """Where figures were taken."""
    return {
        "date": date.today().isoformat(),
        "cpu": processor(),
        "cores": usable_cpus(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def told(about: dict[str, object]) -> str:
    """One line."""
    return ", ".join(f"{key} {value}" for key, value in about.items())


def measured(parts: dict[str, Cases], options: argparse.Namespace) -> list[Row]:
    """Run the parts, print their rows as they come, write what `--json` names."""
    device, rows = torch.device(options.device), list[Row]()
    about = machine(device)
    print(told(about))
    print(line(HEADER), flush=True)
    for cases in parts.values():
        allocator.as_usual()
        for case in cases(device, options.quick):
            if options.quick:  # sizes at which a ratio means nothing
                case = replace(case, at_least=None)
            for threads in options.threads:
                rows.append(compared(case, threads, device))
                print(line(rows[-1].cells()), flush=True)
    asked = [row for row in rows if (row.at_least, row.most_memory) != (None, None)]
    print(f"{sum(row.misses for row in asked)} of {len(asked)} rows miss what is asked of them")
    if options.json is not None:
        content = {"machine": about, "rows": [row.record() for row in rows]}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return rows


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all parts share."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--quick", action="store_true", help="small sizes and few rounds: whether it works")
    made.add_argument("--json", type=Path, help="file for all figures")
    return made


def main(cases: Cases, description: str | None) -> None:
    """A part as a script of its own."""
    measured({"": cases}, parser(description).parse_args())
