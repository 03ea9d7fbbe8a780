"""Recipes begun by forking a process that has imported everything, so that a start takes no six seconds.

For scripts that tests start afresh: a process that has threads, such as pytest's, is no parent to fork.
"""

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import faiss  # noqa: F401  # what a run imports late
import PIL.Image
import torch._dynamo  # noqa: F401

from nestling.ssl.command_line import run

PIL.Image.init()

TINY = [
    *("views.global_size=16", "views.local_size=8", "views.num_local=2", "train.precision=fp32"),
    *("head.num_prototypes=64", "head.hidden_dim=32", "head.bottleneck_dim=16", "log.every=1"),
    *("knn.k=5", "knn.size=16", "knn.crop_ratio=1.0", "log.progress=none"),
    *("optim.warmup_epochs=1", "teacher.temperature_warmup_epochs=1"),
]


def begun(main: Callable[[list[str]], None], argv: list[str], said: Path, **variables: str) -> int:
    """Run the recipe `main` in a child, what it prints going to the file `said`; returns its process id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.environ.update(variables)
        handle = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        run(main, argv)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def both(main: Callable[[list[str]], None], argv: list[str], said: Path, port: int) -> list[int]:
    """Two processes of one run, as a launcher would start them."""
    shared = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
    return [
        begun(
            main, argv, said.with_name(f"{said.name}_{rank}"), RANK=str(rank), LOCAL_RANK=str(rank), **shared
        )
        for rank in (0, 1)
    ]


def code_of(child: int, seconds: float = 300) -> int:
    """The exit code of a child that ends by itself, the negative signal of one that was killed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    raise TimeoutError(f"process {child} still runs after {seconds} s")
