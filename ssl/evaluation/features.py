"""Features of every image once, in the order of the dataset, whatever the number of processes.

Shapes used below: B images of a batch, N images of the dataset, n of them readable, S pixels of a side,
D channels.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from nestling.backbones.features import Backbone
from nestling.ssl.data.failures import Failure
from nestling.ssl.data.loader import EvalBatch
from nestling.ssl.data.workers import deaths_explained
from nestling.ssl.distributed import everyones, failing_together, is_distributed, is_main
from nestling.ssl.evaluation.readouts import Readout, last_blocks, readout
from nestling.ssl.views.render import normalize

Batches = Iterable[EvalBatch]

ROWS = 65536  # gathered at once, which bounds the memory it takes on an accelerator


class Rows(NamedTuple):
    """One row per readable image, in the order of the dataset; on the main process, empty on the others.

    `failures` are those of all processes, and the same on all.

    Shape:
        indices: (n,) int64, of the dataset, rising; vectors: {name: (n, D)}
    """

    indices: Tensor
    vectors: dict[str, Tensor]
    failures: list[Failure]


def extract(
    backbone: Backbone,
    batches: Batches,
    num_images: int,
    poolings: Sequence[str],
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device | str,
    autocast: torch.dtype | None = None,
) -> Rows:
    """The vector of each readable image under each pooling, the name of a read-out.

    Each process hands in the batches of its own share, which may be of unequal length or empty. The
    forward runs in evaluation mode, in `autocast` where given, and leaves the backbone and every
    random generator as it found them.

    Shape:
        batches of (B,), (B, C, S, S) uint8 -> vectors {pooling: (n, D) float32 on the CPU}

    Raises:
        UserError: an unknown pooling, more last blocks than the network has, or what `batches` raise.
    """
    readouts = [readout(name) for name in poolings]
    device = torch.device(device)
    seen = [torch.empty(0, dtype=torch.long)]
    kept: dict[str, list[Tensor]] = {name: [] for name in poolings}
    failures: list[Failure] = []
    # Not inference_mode: what a backbone caches in there, training could not use.
    with untouched(backbone), failing_together(), deaths_explained(), torch.no_grad():
        backbone.eval()
        for indices, rows, failed in forward(backbone, batches, readouts, mean, std, device, autocast):
            failures += failed
            seen.append(indices)
            for name, vectors in rows.items():
                kept[name].append(vectors)
    joined = {name: _joined(parts) for name, parts in kept.items()}
    return in_dataset_order(torch.cat(seen), joined, failures, num_images, device)


def forward(
    backbone: Backbone,
    batches: Batches,
    readouts: Sequence[Readout],
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device,
    autocast: torch.dtype | None = None,
) -> Iterator[tuple[Tensor, dict[str, Tensor], list[Failure]]]:
    """Batch by batch: which images, their vectors, and those that can't be read; {} where none can.

    Shape:
        batches of (B,), (B, C, S, S) uint8 -> (B,) int64, {name: (B, D) float32}, both on the CPU
    """
    for indices, images, failed in batches:
        rows: dict[str, Tensor] = {}
        if len(indices):
            pixels = normalize(images.to(device, non_blocking=True), mean, std)
            with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
                blocks = last_blocks(backbone, pixels, readouts)
            rows = {wanted.name: wanted(blocks).cpu() for wanted in readouts}
        yield indices.cpu(), rows, failed


def num_features(
    backbone: Backbone, poolings: Sequence[str], channels: int, size: tuple[int, int], device: torch.device
) -> int:
    """Numbers per image, of all poolings together, told by a forward pass.

    Raises:
        UserError: as `extract`.
    """
    readouts = [readout(name) for name in poolings]
    images = torch.zeros(1, channels, *size, device=device)
    with untouched(backbone), torch.no_grad():
        blocks = last_blocks(backbone.eval(), images, readouts)
    return sum(wanted(blocks).shape[1] for wanted in readouts)


def _joined(parts: list[Tensor]) -> Tensor:
    """All rows; a process whose share is empty still takes part in the gathering, with the others' width."""
    width = max(everyones([parts[0].shape[1] if parts else 0]))
    return torch.cat(parts) if parts else torch.empty(0, width)


@contextmanager
def untouched(module: nn.Module | None = None) -> Iterator[None]:
    """Put back every submodule's mode, the random generators and torch's thread count."""
    modes = [(part, part.training) for part in (module.modules() if module else ())]
    python_state, numpy_state, threads = random.getstate(), np.random.get_state(), torch.get_num_threads()
    accelerators = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=accelerators):
            yield
    finally:
        for part, training in modes:
            part.training = training
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def in_dataset_order(
    indices: Tensor,
    vectors: dict[str, Tensor],
    failures: list[Failure],
    num_images: int,
    device: torch.device | str,
) -> Rows:
    """Gather the shares of all processes on the main one, in the order of the dataset.

    Shape:
        indices (m,), vectors {name: (m, D)} of this process -> Rows
    """
    failures = everyones(failures)
    indices = gather_rows(indices, device)
    gathered = {name: gather_rows(part, device) for name, part in vectors.items()}
    if not is_main():
        return Rows(torch.empty(0, dtype=torch.long), {}, failures)
    unreadable = torch.tensor([failure.image for failure in failures], dtype=torch.long)
    times = torch.bincount(torch.cat([indices, unreadable]), minlength=num_images)
    assert len(times) == num_images, "an index lies beyond the dataset"
    assert bool((times == 1).all()), "each image must be seen exactly once"
    order = indices.argsort()
    return Rows(indices[order], {name: rows[order] for name, rows in gathered.items()}, failures)


def gather_rows(rows: Tensor, device: torch.device | str) -> Tensor:
    """Rows of all processes, of unequal numbers, one process after the other, on the main one's CPU.

    Shape:
        (n, …) of each process -> (sum of n, …) on the main process, (0, …) on the others
    """
    if not is_distributed():
        return rows
    world = dist.get_world_size()
    place = torch.device("cpu") if dist.get_backend() == "gloo" else torch.device(device)
    counts = [torch.zeros(1, dtype=torch.long, device=place) for _ in range(world)]
    dist.all_gather(counts, torch.tensor([len(rows)], device=place))
    sizes = [int(count) for count in counts]
    parts: list[list[Tensor]] = [[] for _ in range(world)]
    for start in range(0, max(sizes), ROWS):
        longest = min(ROWS, max(sizes) - start)
        share = rows[start : start + longest].to(place)
        padded = share.new_zeros(longest, *rows.shape[1:])
        padded[: len(share)] = share
        slots = [torch.empty_like(padded) for _ in range(world)] if is_main() else None
        dist.gather(padded, slots, dst=0)
        for part, slot, size in zip(parts, slots or [], sizes, strict=False):
            part.append(slot[: max(0, min(longest, size - start))].cpu())
    filled = [piece for part in parts for piece in part]
    return torch.cat(filled) if filled else rows[:0]
