"""What becomes of freed memory: whether the next step finds it or the system gets it back.

Said to glibc; other allocators are left as they are.
"""

import ctypes
import gc
import sys

import torch

# Of mallopt(3).
TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4
KEPT = ((MMAP_MAX, 0), (TRIM_THRESHOLD, -1))  # no block in pages of its own, and no end of the heap cut off
USUAL = ((MMAP_MAX, 65536), (MMAP_THRESHOLD, 32 * 2**20), (TRIM_THRESHOLD, 64 * 2**20))


def keep_freed() -> None:
    """Let later tensors take the pages that earlier ones left; the process keeps the most it ever held.

    As it is, glibc hands blocks above 32 MB and the end of its heap back at once. The next step asks for them
    again, and the system clears every page: a tenth of the time of training on a CPU.
    """
    limit(*KEPT)


def as_usual() -> None:
    """Set glibc's own limits, at the largest that they grow to by themselves."""
    limit(*USUAL)


def limit(*limits: tuple[int, int]) -> None:
    """Set pairs of a name above and its value."""
    set_limit = getattr(_library(), "mallopt", None)
    if set_limit is not None:
        for name, value in limits:
            set_limit(name, value)


def give_back() -> None:
    """Hand what was freed back to the system and the device, which allocators keep for next time."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim = getattr(_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _library() -> ctypes.CDLL | None:
    """What this process is linked with, on Linux; it is glibc where it has both functions."""
    return ctypes.CDLL(None) if sys.platform == "linux" else None
