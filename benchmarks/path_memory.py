"""What the paths of a large folder cost in memory, loader processes included, beside a list of strings.

    python benchmarks/path_memory.py [--paths 3000000] [--workers 8] [--start fork spawn]

Each way has a process of its own, whose loader processes touch every path each: all packed paths, the
part that is left when some are held out, all in a list. Its cost is the sum of the proportional set
sizes of the processes, less the same with ten paths. Linux only.
"""

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader, Dataset

from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.sources.base import ImageSource, holdout
from nestling.ssl.data.sources.cache import Remembered
from nestling.ssl.data.sources.files import FileSource
from nestling.ssl.data.sources.index import keep, kept, key_of
from nestling.ssl.data.sources.packed import END, Packer

LIMIT = 300  # MB, of all processes together, for up to three million paths
ROOT = "/data/imagenet/train"
PER_CLASS = 1300  # images, named as ImageNet's are
WAYS = ("packed", "part", "list")


class Touched(Dataset[int]):
    """Every item touches all paths, as a loader process does in the course of an epoch or of several."""

    def __init__(self, source: ImageSource, way: str) -> None:
        self.paths = [source.path(index) for index in range(len(source))] if way == "list" else None
        self.source = (
            holdout(source, 0.1, seed=0)[0] if way == "part" else source if way == "packed" else None
        )

    def __getitem__(self, item: int) -> int:
        if self.paths is not None:
            return sum(len(path) for path in self.paths)
        assert self.source is not None
        return sum(len(self.source.path(index)) for index in range(len(self.source)))


def write_index(num_paths: int, cache: str) -> str:
    """An index as a scan would keep it, without the files; returns its key."""
    packer = Packer()
    for first in range(0, num_paths, PER_CLASS):
        count, name = min(PER_CLASS, num_paths - first), b"n%08d" % (first // PER_CLASS)
        names = b"".join(b"%s_%d.JPEG" % (name, number) + END for number in range(count))
        packer.extend(name, names, count)
    labels = np.arange(num_paths, dtype=np.int64) // PER_CLASS
    facts = {"class_names": [os.fsdecode(name) for name in packer.folders], "passed_over": ""}
    key = key_of(ROOT, str(num_paths))
    keep(Remembered(packer.arrays() | {"labels": labels}, facts), cache, key)
    return key


def measure(way: str, start: str, key: str, cache: str, workers: int) -> float:
    """Megabytes of this process and its loader processes after all paths were touched."""
    (index,) = kept(cache, key)
    dataset = Touched(FileSource("synthetic", ROOT, Decoder(), index), way)
    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=range(workers),
        num_workers=workers,
        multiprocessing_context=start,
        persistent_workers=True,  # else they would be gone before they are measured
    )
    assert len({int(length) for length in loader}) == 1, "all processes see the same paths"
    processes = [os.getpid(), *(child.pid for child in multiprocessing.active_children() if child.pid)]
    return sum(proportional_set_size(process, cache) for process in processes) / 1e6


def proportional_set_size(process: int, cache: str) -> int:
    """Bytes, pages that n processes share as 1/n each; code is left out, which other programs share too."""
    total, counts = 0, False
    for line in Path(f"/proc/{process}/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
        words = line.split(maxsplit=5)
        if not words[0].endswith(":"):  # addresses, rights, offset, device, number and perhaps name of a file
            counts = words[4] == "0" or words[-1].startswith((cache, "/dev/shm"))
        elif words[0] == "Pss:" and counts:
            total += 1024 * int(words[1])
    return total


def in_own_process(way: str, start: str, key: str, cache: str, workers: int) -> float:
    """`measure` in a fresh process."""
    command = [sys.executable, __file__, "--measure", way, start, key, cache, "--workers", str(workers)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Print a table; exit with 1 where packed paths cost more than the limit."""
    parser = argparse.ArgumentParser(description="Memory of many paths under a loader with workers.")
    parser.add_argument("--paths", type=int, default=3_000_000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--start", nargs="+", default=["fork", "spawn"], choices=["fork", "spawn"])
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        way, start, key, cache = options.measure
        print(measure(way, start, key, cache, options.workers))
        return
    print(f"{options.paths} paths, {options.workers} loader processes and their parent; MB in all")
    print(f"{'start':8}" + "".join(f"{way:>10}" for way in WAYS))
    costs = []
    with tempfile.TemporaryDirectory() as cache:
        key, one = write_index(options.paths, cache), write_index(10, cache)
        for start in options.start:
            without = in_own_process("packed", start, one, cache, options.workers)
            cost = {way: in_own_process(way, start, key, cache, options.workers) - without for way in WAYS}
            print(f"{start:8}" + "".join(f"{cost[way]:10.0f}" for way in WAYS), flush=True)
            costs += [cost["packed"], cost["part"]]
    if max(costs) >= LIMIT:
        sys.exit(f"packed paths cost {max(costs):.0f} MB, more than {LIMIT}")


if __name__ == "__main__":
    main()
