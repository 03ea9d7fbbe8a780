"""What evaluations share that run in one process and show the backbone images of many sizes."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from nestling.backbones import Backbone
from nestling.ssl.data.failures import UnreadableError
from nestling.ssl.errors import UserError
from nestling.ssl.run import processes

AHEAD = 8  # images decoded by threads while one is looked at


def device_alone(program: str) -> torch.device:
    """The device of this process, the only one.

    Raises:
        UserError: a launcher started several, each of which would do all the work.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started > 1:
        raise UserError(
            f"{program} runs in one process, but the launcher started {started}; "
            f"start it as `python {program}`"
        )
    return torch.device(processes.join().device)


def fitting_size(backbone: Backbone, height: int, width: int) -> tuple[int, int]:
    """That size where the backbone takes it, else the nearest multiples of its patch.

    Raises:
        UserError: it takes those neither.
    """
    try:
        backbone.check_size(height, width)
        return height, width
    except ValueError:
        step = backbone.stride
        least = -(-backbone.min_size // step) * step
        high, wide = (max(least, round(side / step) * step) for side in (height, width))
    try:
        backbone.check_size(high, wide)
    except ValueError as error:
        raise UserError(str(error)) from error
    return high, wide


def read_ahead(
    load: Callable[[str], np.ndarray], paths: Sequence[str]
) -> Iterator[np.ndarray | UnreadableError]:
    """The images of `paths` in turn, or why one can't be read, a few of them decoded ahead by threads."""

    def attempt(path: str) -> np.ndarray | UnreadableError:
        try:
            return load(path)
        except UnreadableError as problem:
            return problem

    with ThreadPoolExecutor(AHEAD) as threads:
        waiting: list[Future[np.ndarray | UnreadableError]] = []
        for path in paths:
            waiting.append(threads.submit(attempt, path))
            if len(waiting) > AHEAD:
                yield waiting.pop(0).result()
        for future in waiting:
            yield future.result()
