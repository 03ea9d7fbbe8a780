"""Whether a pretraining's host memory grows: real steps with loader processes, k-NN and checkpoints.

    python benchmarks/host_memory.py [--steps 2000] [--images 256] [--workers 2] [--limit KB] [KEY=VALUE …]

A tiny network trains through `recipes/dino_xcit.py` on textures written for it; KEY=VALUE go to the recipe.
Sampled is the resident memory of the process, and of it with its loader processes. The first quarter of the
steps is warm-up; over the rest a line is fitted. Exit code 1 where the process grows by `--limit` or more.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
from PIL import Image

ROOT = Path(__file__).parents[1]
BATCH = 32
LIMIT = 5.0  # kB per step: 2000 steps then cost 10 MB; a batch of the tiny views is 280 kB as floats
TINY = [
    *("backbone.name=xcit_nano_12_p4", "backbone.options={embed_dim: 16, depth: 1, num_heads: 2}"),
    *("views.global_size=16", "views.local_size=8", "views.num_local=2", "train.precision=fp32"),
    *("head.num_prototypes=64", "head.hidden_dim=32", "head.bottleneck_dim=16", "log.every=10"),
    *("optim.warmup_epochs=1", "teacher.temperature_warmup_epochs=1"),
    *("knn.k=5", "knn.size=16", "knn.crop_ratio=1.0", "log.progress=none", f"train.batch_size={BATCH}"),
]


def write_images(folder: Path, number: int) -> None:
    """Class folders of small noise images."""
    generator = np.random.default_rng(0)
    for index in range(number):
        place = folder / f"class_{index % 4}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(256, size=(20, 20, 3), dtype=np.uint8)).save(
            place / f"{index}.png"
        )


def resident(process: psutil.Process) -> tuple[float, float]:
    """Megabytes of a process, and of it with all that it started; pages they share count each time."""
    own, below = process.memory_info().rss, 0
    for child in process.children(recursive=True):
        try:
            below += child.memory_info().rss
        except psutil.NoSuchProcess:  # an evaluation's loader, say
            continue
    return own / 1e6, (own + below) / 1e6


def last_step(log: Path) -> int:
    """The step of the last line of a log that is being written, -1 before there is one."""
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    return int(lines[-1].split(",")[0].rpartition(" ")[2]) if lines else -1


def sampled(command: list[str], log: Path, seconds: float = 0.2) -> np.ndarray:
    """Rows of step, own megabytes and megabytes with loaders, while `command` trains."""
    rows: list[tuple[float, float, float]] = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as running:
        process = psutil.Process(running.pid)
        while running.poll() is None:
            step = last_step(log)
            if step > 0:
                try:
                    rows.append((step, *resident(process)))
                except psutil.NoSuchProcess:
                    break
            time.sleep(seconds)
    if running.returncode:
        sys.exit(f"the recipe ended with exit code {running.returncode}")
    return np.array(rows)


def told(name: str, steps: np.ndarray, megabytes: np.ndarray) -> float:
    """Print one row; returns the kB per step after warm-up."""
    late = (steps > steps.max() / 4) & (steps < steps.max())  # after the last one it draws its picture
    slope = 1000 * float(np.polyfit(steps[late], megabytes[late], 1)[0])
    start, end = np.median(megabytes[late][:5]), np.median(megabytes[late][-5:])
    print(f"{name:22}{start:12.1f}{end:12.1f}{slope:14.2f}")
    return slope


def main() -> None:
    """Train, print a table, judge the slope."""
    parser = argparse.ArgumentParser(description="Growth of host memory over a pretraining.")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=float, default=LIMIT, help="kB per step")
    parser.add_argument("settings", nargs="*", help="the recipe's own key=value")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        images, out = Path(folder, "images"), Path(folder, "run")
        write_images(images, options.images)
        per_epoch = options.images * 9 // 10 // BATCH  # a tenth is held out for k-NN
        epochs = -(-options.steps // per_epoch)
        given = {setting.partition("=")[0] for setting in options.settings}
        tiny = [setting for setting in TINY if setting.partition("=")[0] not in given]
        command = [sys.executable, "recipes/dino_xcit.py", f"data.train={images}", f"out={out}", *tiny]
        command += [f"data.num_workers={options.workers}", f"train.epochs={epochs}"]
        command += [f"train.checkpoint_every={epochs / 20:.0f}", f"knn.every={epochs / 20:.0f}"]
        rows = sampled([*command, *options.settings], out / "log.jsonl")
    plural = "es" if options.workers != 1 else ""
    print(f"{rows[-1, 0]:.0f} steps of {BATCH} images, {options.workers} loader process{plural}")
    print(f"{'MB':22}{'warm':>12}{'end':>12}{'kB per step':>14}")
    slope = told("process", rows[:, 0], rows[:, 1])
    told("with loader processes", rows[:, 0], rows[:, 2])
    if slope >= options.limit:
        sys.exit(f"host memory grows by {slope:.1f} kB per step, {options.limit:g} are allowed")


if __name__ == "__main__":
    main()
