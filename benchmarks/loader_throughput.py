"""Images per second of the training loader with several numbers of loader processes.

    python benchmarks/loader_throughput.py [--workers 0 1 2 4 8] [--images 256] [--batches 12] [KEY=VALUE …]

JPEGs of 500 x 375 pixels are written to a temporary folder; views are those of the defaults, 2 x 224 and
8 x 96, unless KEY=VALUE say otherwise, as in views.color_on=device. A row counts from when each process has
handed over a batch. CPU seconds are those of the process and its loader processes; images per second and core
are for the cores that as many processes can use.
"""

import argparse
import io
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import psutil
from PIL import Image

from nestling.ssl.command_line import read
from nestling.ssl.config import Config
from nestling.ssl.data.loader import TrainLoader
from nestling.ssl.data.sources.base import ImageSource
from nestling.ssl.data.sources.opening import open_source
from nestling.ssl.distributed import usable_cpus

HEIGHT, WIDTH = 375, 500
AHEAD = 2  # batches that each loader process makes before they are asked for


def photograph(number: int, height: int = HEIGHT, width: int = WIDTH) -> bytes:
    """A JPEG of smooth colours and some noise, about as large as a photograph of that size."""
    random = np.random.default_rng(number)
    coarse = Image.fromarray(random.integers(256, size=(8, 10, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.float32)
    pixels = (smooth + random.normal(0, 12, smooth.shape)).clip(0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "jpeg", quality=90)
    return file.getvalue()


def write_photographs(folder: Path, count: int) -> None:
    """0000.jpg, 0001.jpg, …"""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / f"{number:04d}.jpg").write_bytes(photograph(number))


def cpu_seconds() -> float:
    """Of this process and those that it has running."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(spent.user + spent.system for spent in times)


def measured(source: ImageSource, config: Config, workers: int, batches: int) -> tuple[float, float]:
    """Images per second, and CPU seconds per image."""
    config.data.num_workers = workers
    warm = max(1, workers * AHEAD)
    with TrainLoader(source, config, warm + batches + workers * AHEAD, 0, 1) as loader:
        iterator = iter(loader)
        for _ in range(warm):
            next(iterator)
        start, spent = time.perf_counter(), cpu_seconds()
        images = sum(len(next(iterator).indices) for _ in range(batches))
        return images / (time.perf_counter() - start), (cpu_seconds() - spent) / images


def main() -> None:
    """Write the images, print one row per number of loader processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--batches", type=int, default=12, help="batches that a row counts")
    parser.add_argument("settings", nargs="*", help="key=value of a pretraining")
    options = parser.parse_intermixed_args()
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more than cores, on purpose
    with tempfile.TemporaryDirectory() as folder:
        write_photographs(Path(folder, "images"), options.images)
        given = [f"data.train={folder}/images", f"data.cache={folder}/cache"]
        config = read(Config, [*given, *options.settings], program="loader_throughput.py")
        source, cores = open_source(config.data, "train"), usable_cpus()
        print(f"{options.images} JPEGs of {WIDTH} x {HEIGHT}, batches of {config.train.batch_size}, ", end="")
        print(f"{cores} core{'s' if cores > 1 else ''}, views.color_on={config.views.color_on}")
        print(f"{'workers':>7}{'images/s':>12}{'per core':>12}{'CPU ms per image':>20}", flush=True)
        for workers in options.workers:
            rate, seconds = measured(source, config, workers, options.batches)
            per_core = rate / min(max(workers, 1), cores)
            print(f"{workers:7}{rate:12.1f}{per_core:12.1f}{1000 * seconds:20.2f}", flush=True)


if __name__ == "__main__":
    main()
