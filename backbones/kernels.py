"""What compiled kernels share: whether they are there, and torch's own threads to work in."""

import ctypes
import os
import sys
from pathlib import Path

import torch

PROCESS = os.getpid()


def check_absent(error: ImportError, name: str) -> None:
    """Raises ImportError for a kernel that can't be loaded; none is built without a compiler."""
    if not (isinstance(error, ModuleNotFoundError) and error.name == name):
        message = f"nestling's compiled kernel can't be loaded, reinstall nestling: {error}"
        raise ImportError(message) from error


def address_of_parallel() -> int:
    """That of GOMP_parallel, GNU's way to call OpenMP's threads, in the OpenMP that torch brings; or 0.

    Linux's and macOS's know it. Those of another pool would share the cores with torch's, which look out for
    work for milliseconds after each operation.
    """
    suffix = {"linux": "so", "darwin": "dylib"}.get(sys.platform)
    library = Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{suffix}"
    try:
        function = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):  # another system, or another OpenMP
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


PARALLEL = address_of_parallel()


def has_torchs_threads() -> bool:
    """Whether kernels that know PARALLEL work in them: not in a fork, which has none, unknown to OpenMP."""
    return PARALLEL != 0 and os.getpid() == PROCESS
