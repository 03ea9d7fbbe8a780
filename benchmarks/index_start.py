"""How long a start takes over a large folder: the first scan, a second start, and torchvision's scan.

    python benchmarks/index_start.py [--files 1000000] [--repeats 3] [--folder /a/large/disk]

The files are empty and in class folders; what the system knows about them is in its memory, as all of
them were just written. Medians of runs that take turns.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sized
from functools import partial
from pathlib import Path

from torchvision.datasets import ImageFolder

from nestling.ssl.data.sources.folder import Folder

PER_CLASS = 1300


def write_files(root: Path, count: int) -> None:
    """Empty files in class folders that say they changed an hour ago, so that an index of them holds."""
    for first in range(0, count, PER_CLASS):
        folder = root / f"n{first // PER_CLASS:08d}"
        folder.mkdir(parents=True)
        for number in range(min(PER_CLASS, count - first)):
            os.close(os.open(folder / f"{folder.name}_{number}.JPEG", os.O_CREAT | os.O_WRONLY))
    then = time.time() - 3600
    for folder in (*root.iterdir(), root):
        os.utime(folder, (then, then))


def seconds(start: Callable[[], Sized], expected: int) -> float:
    """Time to open a source, which must hold that many images."""
    began = time.perf_counter()
    source = start()
    took = time.perf_counter() - began
    assert len(source) == expected, len(source)
    return took


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description="Time to open a large folder.")
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the files are made, for as long as it takes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        root = Path(place) / "images"
        write_files(root, options.files)
        times: dict[str, list[float]] = {"first scan": [], "second start": [], "torchvision": []}
        for repeat in range(options.repeats):
            cache = os.path.join(place, f"cache_{repeat}")
            for way in ("first scan", "second start"):
                times[way].append(seconds(partial(Folder, str(root), cache=cache), options.files))
            times["torchvision"].append(seconds(partial(ImageFolder, root), options.files))
    print(f"{options.files} files in folders of {PER_CLASS}; median of {options.repeats}, seconds")
    for way, taken in times.items():
        print(f"{way:14}{statistics.median(taken):8.2f}")


if __name__ == "__main__":
    main()
