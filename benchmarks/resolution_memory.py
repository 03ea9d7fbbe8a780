"""Time and memory of ViT with fused attention and of XCiT, one image at a time, from 224 to 1536 pixels.

    python benchmarks/resolution_memory.py [--patches 16 8] [--sides 224 1536] [--repeats 3] [--most-memory 3]
        [--device cuda] [--quick] [--json FILE]

Prints a Markdown table: the extra memory at the peak and the time of a forward without gradients and of a
forward and backward, and XCiT's share of ViT's. Each network and size has a process of its own, as what an
earlier one left behind would hide a peak; past `--most-memory` gigabytes no larger size follows. Times are
medians, on a CPU of the process' own time on one thread; `--repeats 0` takes that of the call whose memory
is measured, where sizes take minutes. ViT runs torch's fused attention at all sizes, which a profile tells;
by itself it takes plain products for few tokens on a CPU.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from side_by_side import machine, tensors_at_peak, timed
from torch.profiler import ProfilerActivity, profile

from nestling import backbones
from nestling.backbones import few_tokens
from nestling.ssl import allocator
from nestling.ssl.run import memory

FAMILIES = {"vit": "vit_small_p{}", "xcit": "xcit_small_12_p{}"}
SIDES = (224, 384, 512, 768, 1024, 1536)
GIGABYTE = 1e9
DEPTH = 12  # blocks of ViT-S
HEADER = ("patch", "pixels", "tokens", "", "ViT", "XCiT", "XCiT / ViT")


@dataclass(frozen=True)
class Cost:
    """Bytes and seconds of one image, and how often fused attention ran backward in the step."""

    forward_memory: float
    step_memory: float
    forward_time: float
    step_time: float
    fused: int


def measured(name: str, side: int, repeats: int, device: torch.device) -> Cost:
    """Here and now, in fp32; weights and their gradients are held before."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    few_tokens.LONGEST = 0  # none are few: the process is this measurement's own
    network = backbones.create(name).to(device)
    image = torch.randn(1, 3, side, side, device=device)

    def step() -> None:
        network.train().zero_grad(set_to_none=False)
        network(image).cls.sum().backward()

    def forward() -> None:
        with torch.no_grad():
            network.eval()(image)

    network(image[..., :64, :64]).cls.sum().backward()  # what is loaded and planned once
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        peaks, once = zip(*(first(call, device) for call in (forward, step)), strict=True)
    times = [
        statistics.median([seconds(call, device) for _ in range(repeats)] or [alone])
        for call, alone in zip((forward, step), once, strict=True)
    ]
    return Cost(*peaks, *times, fused_kernels(seen))


def first(call: Callable[[], object], device: torch.device) -> tuple[int, float]:
    """The extra memory and the time of the same call."""
    peak: list[int | None] = []
    took = seconds(lambda: peak.append(extra_memory(call, device)), device)
    if peak[0] is None:
        raise SystemExit("this system doesn't tell how much memory a process takes")
    return peak[0], took


def extra_memory(call: Callable[[], object], device: torch.device) -> int | None:
    """Bytes at a call's peak beyond what was held before it; on a CPU all that the system gives."""
    if device.type == "cuda":
        return tensors_at_peak(call, device)
    if sys.platform != "linux":
        return None
    with returned_at_once():
        allocator.give_back()
        memory.forget_peak()
        before = memory.status("VmRSS")
        call()
        return memory.status("VmHWM") - before


@contextmanager
def returned_at_once() -> Iterator[None]:
    """Every tensor is of pages of its own, so that a peak is what was asked for.

    glibc's heap keeps what is let go of, for whichever call comes next, and is the larger the more it is in
    pieces: the same call takes twice as much or half of it.
    """
    allocator.as_usual()
    allocator.limit((allocator.MMAP_THRESHOLD, 2**18))
    yield
    allocator.as_usual()


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Of the process on a CPU, of the clock on a device."""
    return timed(call, device)[0 if device.type == "cpu" else 1]


def fused_kernels(seen: profile) -> int:
    """How often torch's profiler saw a fused attention kernel run backward."""
    return sum(
        event.count
        for event in seen.key_averages()
        if re.fullmatch(r"aten::_scaled_dot_product_(?!.*math).*_backward", event.key)
    )


def in_own_process(name: str, side: int, options: argparse.Namespace) -> Cost:
    """`measured` in a fresh process."""
    command = [sys.executable, __file__, "--measure", name, str(side), "--repeats", str(options.repeats)]
    done = subprocess.run(
        [*command, "--device", options.device], check=True, stdout=subprocess.PIPE, text=True
    )
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


def lines(patch: int, side: int, vit: Cost, xcit: Cost) -> list[str]:
    """Two rows of the table, memory and time, each of a forward and of a step."""
    rows = []
    for what, kind, unit, scale in (("memory", "memory", "MB", 1e-6), ("time", "time", "s", 1.0)):
        for part, title in (("forward", "forward"), ("step", "forward + backward")):
            ours, theirs = (getattr(cost, f"{part}_{kind}") * scale for cost in (vit, xcit))
            cells = (f"{ours:.3g} {unit}", f"{theirs:.3g} {unit}", f"{theirs / ours:.2f}")
            rows.append(
                " | ".join((str(patch), str(side), str((side // patch) ** 2), f"{title}, {what}", *cells))
            )
    return [f"| {row} |" for row in rows]


def compared(patch: int, sides: list[int], options: argparse.Namespace) -> list[dict[str, object]]:
    """Rows of one patch size, printed as they come. SystemExit where ViT didn't run fused attention."""
    found: list[dict[str, object]] = []
    for side in sides:
        costs = {
            family: in_own_process(name.format(patch), side, options) for family, name in FAMILIES.items()
        }
        if costs["vit"].fused != DEPTH:
            raise SystemExit(
                f"ViT ran fused attention in {costs['vit'].fused} of {DEPTH} blocks at {side} pixels"
            )
        print("\n".join(lines(patch, side, costs["vit"], costs["xcit"])), flush=True)
        found += [
            {"patch": patch, "side": side, "family": key, **asdict(cost)} for key, cost in costs.items()
        ]
        if max(cost.step_memory for cost in costs.values()) > options.most_memory * GIGABYTE:
            break
    return found


def main() -> None:
    """Print the table; write what `--json` names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--patches", type=int, nargs="+", default=[16, 8])
    parser.add_argument("--sides", type=int, nargs="+", default=list(SIDES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--most-memory", type=float, default=3.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="one small size: whether it works")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.measure:
        name, side = options.measure
        print(json.dumps(asdict(measured(name, int(side), options.repeats, device))))
        return
    if options.quick:
        options.patches, options.sides, options.repeats = [16], [144], 1
    about = machine(device)
    print(" · ".join(f"{key} {value}" for key, value in about.items()) + "\n")
    print(f"| {' | '.join(HEADER)} |\n| ---: | ---: | ---: | --- | ---: | ---: | ---: |", flush=True)
    rows = [row for patch in options.patches for row in compared(patch, options.sides, options)]
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
