"""What watches a run: the two ways to collapse, and where the time goes."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from nestling.ssl.distributed import summed

Item = TypeVar("Item")

UNIFORM_ENTROPY = 0.999  # of log K; healthy runs pass through higher values only briefly
UNIFORM_KL = 1e-3
DOMINANT_SHARE = 0.95
CERTAIN_ENTROPY = 0.05  # of log K; below it targets are all but one-hot

UNIFORM = (
    "the teacher's targets have been uniform (entropy {entropy:.4f} of log K, loss at log K) for {steps} "
    "steps, so nothing is learned; lower teacher.temperature and teacher.temperature_start, optim.lr or "
    "head.num_prototypes, keep head.norm_last_layer=true, or lower teacher.momentum for a small data set"
)
ONE_PROTOTYPE = (
    "one prototype has won {share:.0%} of the images for {steps} steps (loss near 0, spread of features "
    "{std:.3f}), so every image looks the same; lower teacher.center_momentum, raise teacher.temperature, "
    "lower optim.lr, or lengthen head.freeze_epochs and optim.warmup_epochs"
)


@dataclass
class CollapseMonitor:
    """Tells both kinds of collapse from a run that is merely young (DINO, section 5.3).

    Early in training the targets of a healthy run are nearly uniform while the center forms,
    so only a state that lasts for `patience` steps counts. Each kind is said once until it ends.
    """

    patience: int
    _since: dict[str, int] = field(default_factory=dict)
    _said: set[str] = field(default_factory=set)

    def check(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Warnings that are due at this step, given the metrics of the DINO term."""
        entropy, kl = metrics["dino/teacher_entropy"], metrics["dino/kl"]
        share, std = metrics["dino/dominant_prototype"], metrics["feature_std"]
        states = {
            UNIFORM: entropy > UNIFORM_ENTROPY and abs(kl) < UNIFORM_KL,
            ONE_PROTOTYPE: share > DOMINANT_SHARE and entropy < CERTAIN_ENTROPY,
        }
        due = []
        for message, holds in states.items():
            if not holds:
                self._since.pop(message, None)
                self._said.discard(message)
                continue
            lasted = step - self._since.setdefault(message, step)
            if lasted >= self.patience and message not in self._said:
                self._said.add(message)
                due.append(message.format(entropy=entropy, steps=lasted, share=share, std=std))
        return due


class Throughput:
    """Images per second and the share of time that the loop spent waiting for data."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start a new window."""
        self._start = time.perf_counter()
        self._waited = 0.0
        self._images = 0

    def waiting(self, batches: Iterator[Item]) -> Item:
        """The next of `batches`, on the clock."""
        start = time.perf_counter()
        item = next(batches)
        self.waited(time.perf_counter() - start)
        return item

    def waited(self, seconds: float) -> None:
        """Add time that went by until there was data."""
        self._waited += seconds

    def count(self, images: int) -> None:
        """Add images of one step, of all processes."""
        self._images += images

    def read(self) -> dict[str, float]:
        """The means since the last call, which starts a new window."""
        elapsed = time.perf_counter() - self._start
        values = {"images_per_second": self._images / elapsed, "data_wait": self._waited / elapsed}
        self.reset()
        return values


class Window:
    """Means of the metrics since they were last read, over steps, micro-batches and processes.

    Non-finite values are counted, not averaged: one bad step would hide all others for ever.
    Values stay on the device until read, so that a step never waits for one.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._total: Tensor | None = None
        self._count: Tensor | None = None

    @torch.no_grad()
    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Gather the scalar metrics of one micro-batch; the names must not change."""
        values = torch.stack([value.detach().float() for value in metrics.values()])
        finite = values.isfinite()
        if self._total is None or self._count is None:
            self._names = list(metrics)
            self._total, self._count = (
                torch.zeros_like(values),
                torch.zeros(2, len(values), device=values.device),
            )
        self._total += values.where(finite, torch.zeros_like(values))
        self._count += torch.stack([finite, ~finite])

    def read(self) -> tuple[dict[str, float], int]:
        """The means, and how many values were not finite; then starts a new window."""
        assert self._total is not None, "nothing was added"
        assert self._count is not None
        total, finite, bad = summed(torch.cat([self._total[None], self._count])).cpu()
        self._total = self._count = None
        return dict(zip(self._names, (total / finite).tolist(), strict=True)), int(bad.sum())
