"""What a forward pass costs here and now: images per second and memory, measured.

Shapes used below: B images of H x W pixels, C channels.
"""

import ctypes
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nestling.backbones import Backbone
from nestling.ssl.evaluation.features import untouched
from nestling.ssl.run.directory import processor

WARM_UP = 2  # batches: the first one also loads and plans
MEGABYTE = 2**20


def measured(
    backbone: Backbone,
    channels: int,
    size: tuple[int, int],
    batch_size: int,
    repeats: int,
    device: torch.device,
) -> dict[str, float | None]:
    """`images_per_second` and `peak_memory_mb` of the float32 forward of a batch at that size.

    The rate is that of the median of `repeats` batches after two that warm up, images being on the device.
    Memory: on CUDA the most that torch had allocated, weights included; on Linux's CPU by how much the
    process grew beyond what it held before; None where neither can be told.
    """
    with untouched(backbone), torch.no_grad():
        backbone.eval()
        images = torch.zeros(batch_size, channels, *size, device=device)
        for _ in range(WARM_UP):
            _seconds(backbone, images)
        peak = _peak_memory(backbone, images)
        median = statistics.median(_seconds(backbone, images) for _ in range(repeats))
    return {"images_per_second": batch_size / median, "peak_memory_mb": peak}


def _seconds(backbone: Backbone, images: Tensor) -> float:
    start = time.perf_counter()
    backbone(images)
    if images.device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - start


def _peak_memory(backbone: Backbone, images: Tensor) -> float | None:
    if images.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(images.device)
        backbone(images)
        return torch.cuda.max_memory_allocated(images.device) / MEGABYTE
    if images.device.type != "cpu" or not _forget_peak():
        return None
    before = _kilobytes("VmRSS")
    backbone(images)
    return (_kilobytes("VmHWM") - before) / 1024


def _forget_peak() -> bool:
    """Let the kernel count the process's largest size anew; False where it doesn't offer that.

    What was freed but kept for later goes back first: growth into it would not be seen.
    """
    if not sys.platform.startswith("linux"):
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is None:
        return False
    trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _kilobytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise AssertionError(f"{name} is in the status of every process")


def machine(device: torch.device) -> dict[str, Any]:
    """Where it was measured: absolute numbers mean nothing without."""
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    return {
        "host": platform.node(),
        "device": device.type,
        "chip": chip,
        "threads": torch.get_num_threads(),
        "precision": "fp32",
        "tf32": torch.backends.cuda.matmul.allow_tf32 if device.type == "cuda" else None,
    }
