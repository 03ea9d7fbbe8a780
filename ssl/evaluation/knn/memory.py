"""What k-NN will take, said before it takes it."""

import logging
from pathlib import Path
from typing import Protocol

from nestling.ssl.distributed import processes_here
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.knn.exact import BLOCK, TILE
from nestling.ssl.names import printable
from nestling.ssl.run.disk import free_bytes, size

log = logging.getLogger("nestling")

LINK_BYTES = 2 * 32 * 4  # of HNSW, per row: twice its links, four bytes each


class _Search(Protocol):
    @property
    def index(self) -> str: ...

    @property
    def features_dir(self) -> str | None: ...


def told_before(width: int, search: _Search, num_images: tuple[int, int], num_processes: int) -> None:
    """Log the memory and disk that features of `width` numbers take, and warn where there is less.

    Raises:
        UserError: `features_dir` is on a disk without the room.
    """
    num_train, num_val = num_images
    train_bytes = num_train * width * (4 if search.features_dir is None else 2)
    working = 24 * min(TILE, num_train * num_val * width) + min(BLOCK, num_train) * width * 4
    memory = num_val * width * 4 + working * num_processes
    if search.index != "flat":  # its own copy, float16
        memory += num_train * (width * 2 + LINK_BYTES * (search.index == "hnsw"))
    where = "in memory"
    if search.features_dir is None:
        memory += train_bytes
    else:
        where = f"as float16 in {printable(search.features_dir)}"
        _refuse_small_disk(search.features_dir, train_bytes, num_processes)
    who = "1 process" if num_processes == 1 else f"{num_processes} processes"
    log.info(
        f"k-NN: {num_train} + {num_val} images, {width} numbers each: {size(train_bytes)} of training "
        f"features {where}, about {size(memory)} of memory over {who}"
    )
    available = available_memory()
    here = memory * processes_here() / num_processes
    if available is not None and here > available:
        log.warning(
            "k-NN: about %s of memory will be needed here and %s is available; knn.features_dir=FOLDER keeps "
            "training features on a disk, and more machines share them",
            size(here),
            size(available),
        )


def _refuse_small_disk(folder: str, num_bytes: int, num_processes: int) -> None:
    needed = num_bytes * processes_here() / num_processes
    free = free_bytes(Path(folder).expanduser().absolute())
    if needed > free:
        raise UserError(
            f"knn.features_dir={printable(folder)}: the training features take {size(needed)} there and "
            f"{size(free)} is free; name a folder on a larger disk"
        )


def available_memory() -> int | None:
    """Bytes that this machine can give without swapping; None where it doesn't say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None
