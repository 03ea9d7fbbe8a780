"""Whether a batch fits into memory: tried on CUDA, foretold from small ones on the CPU.

The kernel kills who takes too much of the host's memory, so there nothing is overstepped. The peak of a step
is a + b B for a batch of B: networks, optimizer and gradients are constant, activations grow with the batch.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from nestling.ssl import allocator
from nestling.ssl.errors import UserError
from nestling.ssl.run import memory
from nestling.ssl.run.disk import size
from nestling.ssl.run.guards import ONE_VALUE

MARGIN = 0.1  # of the memory stays free: for fragments, and for what only a real run does
STRIDE = 8  # larger batches are multiples of it
TELLING_BYTES = 256 * 2**20  # a growth, from one batch to its double, that is well above noise
TELLING_SHARE = 1 / 16  # of the room, where that is less
FLOAT_BYTES = 4


class Step(Protocol):
    """A whole step of training on that many images, and what goes with it."""

    image_bytes: int  # of the views of an image, as bytes per channel
    waiting: int  # batches that loader processes hold ready
    reserved: int  # bytes of the host that a run needs besides its steps

    def __call__(self, batch_size: int) -> None:
        """Take the step."""


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, where all smaller ones do; from 8 on a multiple of 8.

    It doubles until one doesn't fit, then bisects; 0 where not even 1 fits.
    """
    fitting, number = 0, 1
    while number <= most and fits(number):
        fitting, number = number, 2 * number
    stride = STRIDE if fitting >= STRIDE else 1
    failing = min(number, most // stride * stride + stride)
    while failing - fitting > stride:
        number = (fitting + failing) // 2 // stride * stride
        if fits(number):
            fitting = number
        else:
            failing = number
    return fitting


def taken(step: Step, batch_size: int) -> bool:
    """Take a step; False where memory ran out, and then all of it is given back.

    A batch norm with a single value to learn from is left to the guards.
    """
    try:
        step(batch_size)
    except Exception as error:
        if not memory.is_out_of_memory(error):
            if isinstance(error, ValueError) and ONE_VALUE in str(error):
                return True
            raise
    else:
        return True
    allocator.give_back()  # only here, where the error no longer holds the frames with their tensors
    return False


class OnCuda:
    """Steps are tried while a share of the device's memory is held back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def begin(self, step: Step) -> None:
        """From now on this step is tried."""
        self.step = step
        _, total = torch.cuda.mem_get_info(self.device)
        self._held_back = torch.empty(int(MARGIN * total), dtype=torch.uint8, device=self.device)
        self._said = f"{size(total)} of {self.device}, {MARGIN:.0%} held back"

    def fits(self, batch_size: int) -> bool:
        """Whether a step succeeds."""
        fits = taken(self.step, batch_size)
        torch.cuda.synchronize(self.device)
        return fits

    def __str__(self) -> str:
        return self._said


class OnCpu:
    """The peaks of small steps are measured, those of larger ones follow.

    `room` is what this process may take from now on, at the most.

    Raises:
        UserError: the system tells no memory or no peaks.
    """

    def __init__(self, room: int | None = None) -> None:
        allocator.give_back()  # or memory that only this process may take again would count as taken
        room = memory.room() if room is None else room
        try:
            assert room is not None
            memory.forget_peak()
        except (AssertionError, OSError):
            raise UserError(
                "train.batch_size=auto: this system doesn't tell how much memory a step takes, as Linux does "
                "in /proc; give a number"
            ) from None
        self.room, self.limit = room, memory.status("VmRSS") + (1 - MARGIN) * room
        self._peaks: list[tuple[int, float]] = []  # a batch, and the bytes at the peak of its step

    def begin(self, step: Step) -> None:
        """From now on this step is measured."""
        self.step = step
        self.limit -= step.reserved

    def fits(self, batch_size: int) -> bool:
        """Whether the peak of a step stays within the limit."""
        peaks = self._peaks
        if len(peaks) >= 2:
            follows = batch_size == 2 * peaks[-1][0]
            if self._is_telling() or not follows or self.foretold(batch_size) > self.limit:
                return self.foretold(batch_size) <= self.limit
        allocator.give_back()
        memory.forget_peak()
        if not taken(self.step, batch_size):
            return False
        ready = self.step.image_bytes * self.step.waiting * batch_size
        peaks.append((batch_size, memory.status("VmHWM") + ready))
        return peaks[-1][1] <= self.limit

    def foretold(self, batch_size: int) -> float:
        """The peak on the line through the last two that were measured; at least the views add to it."""
        (small, low), (large, high) = self._peaks[-2:]
        slope = max((high - low) / (large - small), FLOAT_BYTES * self.step.image_bytes)
        return high + slope * (batch_size - large)

    def _is_telling(self) -> bool:
        enough = min(TELLING_BYTES, TELLING_SHARE * self.room)
        return len(self._peaks) >= 3 and self._peaks[-1][1] - self._peaks[-2][1] >= enough

    def __str__(self) -> str:
        return f"{size(self.room)} of free memory per process, {MARGIN:.0%} held back"


def fitting_on(device: torch.device) -> OnCuda | OnCpu:
    """How it is found out on a device.

    Raises:
        UserError: it is neither CUDA nor the CPU.
    """
    if device.type not in ("cuda", "cpu"):
        raise UserError(
            f"train.batch_size=auto: memory of {device.type} can't be tried safely; give a number"
        )
    return OnCuda(device) if device.type == "cuda" else OnCpu()
