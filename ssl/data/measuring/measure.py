"""Measuring a data set: several processes read the images as training does, and sum up what they are like."""

import hashlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.data import Dataset

from nestling.ssl.config import Config, Data
from nestling.ssl.data.channels import BY_MODE
from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.decoding.raster import Raster
from nestling.ssl.data.failures import Failure, UnreadableError
from nestling.ssl.data.measuring.facts import Depth, Facts, size_facts, suggested_window
from nestling.ssl.data.sources.base import ImageSource, evenly
from nestling.ssl.data.sources.opening import open_source
from nestling.ssl.data.workers import deaths_explained, default_workers, end, following, loader_of
from nestling.ssl.run.progress import duration
from nestling.ssl.validation import validate

CHUNK = 32  # images that a process measures before it hands their facts over
SECONDS = 10  # between lines of progress where there is no terminal


@dataclass(frozen=True)
class WatchingDecoder(Decoder):
    """Also notes the type and range of the numbers of images deeper than 8 bits, before they are scaled.

    Colours of 16 bits in PNG are such only with a window, as else their upper 8 bits are read alone.
    """

    met: list[tuple[str, Depth]] = field(default_factory=list, compare=False)

    def _of_raster(self, raster: Raster) -> np.ndarray:
        numbers = raster.pixels[:, :, :-1] if raster.colors[-1:] in ("A", "a") else raster.pixels
        if numbers.dtype.itemsize > 1 and not raster.own_range:
            kind = numbers.dtype.newbyteorder("=").name
            self.met.append((kind, Depth(1, float(numbers.min()), float(numbers.max()))))
        return super()._of_raster(raster)


class Measured(Dataset[Facts]):
    """Indices of some images -> their facts; `decoder` is the one that `source` reads through."""

    def __init__(self, source: ImageSource, decoder: WatchingDecoder) -> None:
        self.source, self.decoder = source, decoder

    def __getitem__(self, indices: list[int]) -> Facts:
        facts = Facts.none(self.decoder.channels)
        readable: list[int] = []
        sizes: list[tuple[int, ...]] = []
        digests: list[bytes] = []
        for index in indices:
            self.decoder.met.clear()
            try:
                image = self.source.load(index)
            except UnreadableError as problem:
                facts.failures.append(Failure(index, problem.path, problem.reason))
                continue
            facts.levels += _levels(image)
            readable.append(index)
            sizes.append(image.shape[:2])
            digests.append(_digest(image))
            for kind, depth in self.decoder.met:
                facts.add_depth(kind, depth)
        facts.indices = [np.array(readable, dtype=np.int64)]
        facts.sizes = [np.array(sizes, dtype=np.int32).reshape(-1, 2)]
        facts.digests = [np.frombuffer(b"".join(digests), dtype=np.uint64).reshape(-1, 2)]
        return facts


def _levels(image: np.ndarray) -> np.ndarray:
    """How often each channel has each value; by Pillow, as numpy would turn every pixel into 8 bytes.

    Shape:
        image: (H, W, C) uint8 -> (C, 256) int64
    """
    planes = [Image.fromarray(np.ascontiguousarray(plane)) for plane in np.moveaxis(image, 2, 0)]
    return np.array([plane.histogram() for plane in planes], dtype=np.int64)


def _digest(image: np.ndarray) -> bytes:
    """16 bytes that are the same for images of the same pixels, and for no others that one will meet."""
    digest = hashlib.blake2b(repr(image.shape).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(image).data)
    return digest.digest()


def measure(data: Data, max_images: int | None) -> dict[str, Any]:
    """The facts of `data.train`, or of at most that many of its images, evenly chosen; plain types.

    Raises:
        UserError: there is no such source, or a process died.
    """
    _check(data)
    decoder = WatchingDecoder(**vars(Decoder.of(data)))
    source = open_source(data, "train", decoder)
    chosen = evenly(len(source), max_images)
    workers = default_workers(on_cpu=False) if data.num_workers is None else data.num_workers
    facts = facts_of(Measured(source, decoder), chosen, workers, data.start_method)
    return _in_plain_types(facts, source, data)


def depths_of(data: Data, max_images: int) -> dict[str, Depth]:
    """By type, the values in a few images of more than 8 bits; nothing where there are none such."""
    decoder = WatchingDecoder(**vars(Decoder.of(data)))
    source = open_source(data, "train", decoder)
    return Measured(source, decoder)[evenly(len(source), max_images).tolist()].depths


def facts_of(measured: Measured, chosen: np.ndarray, workers: int, start_method: str | None = None) -> Facts:
    """The facts of the images of those indices.

    Raises:
        UserError: a loader process died.
    """
    facts = Facts.none(measured.decoder.channels)
    chunks = [chosen[start : start + CHUNK].tolist() for start in range(0, len(chosen), CHUNK)]
    parts = iter(loader_of(measured, chunks, workers, start_method))
    try:
        with deaths_explained():
            for part in _shown((following(parts) for _ in chunks), len(chosen)):
                facts.join(part)
    finally:
        end(parts)
    return facts


def _check(data: Data) -> None:
    """As of a run; mean and std, which are to be found here, may be missing."""
    count = data.in_chans or BY_MODE.get(data.mode, 1)
    validate(Config(data=replace(data, mean=[0.5] * count, std=[0.5] * count)))


def _shown(parts: Iterator[Facts], num_images: int) -> Iterator[Facts]:
    """The same parts, while a bar or lines tell how far they are and the time left."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.completed}/{task.total} images"), BarColumn(), TimeRemainingColumn())
    start = said = time.perf_counter()
    done = 0
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=num_images)
        for part in parts:
            yield part
            done += len(part) + len(part.failures)
            bar.update(task, completed=done)
            now = time.perf_counter()
            if bar.disable and now - said >= SECONDS:
                said = now
                left = (now - start) / done * (num_images - done)
                console.print(f"{done}/{num_images} images, left {duration(left)}")


def _in_plain_types(facts: Facts, source: ImageSource, data: Data) -> dict[str, Any]:
    groups = facts.duplicates()
    found: dict[str, Any] = {
        "source": source.name,
        "images": len(source),
        "passed_over": source.passed_over,
        "classes": None if source.class_names is None else len(source.class_names),
        "measured": len(facts) + len(facts.failures),
        "readable": len(facts),
    }
    if len(facts):
        found |= {"mean": facts.mean().tolist(), "std": facts.std().tolist()}
        found["sizes"] = size_facts(facts.heights_and_widths())
    found["depths"] = {kind: depth._asdict() for kind, depth in sorted(facts.depths.items())}
    found["window"] = suggested_window(facts.depths) if data.window is None else None
    found["duplicates"] = [[source.path(int(index)) for index in group] for group in groups]
    failures = sorted(facts.failures, key=_bytes_of_path)
    found["unreadable"] = [{"path": failure.path, "reason": failure.reason} for failure in failures]
    return found


def _bytes_of_path(failure: Failure) -> bytes:
    return os.fsencode(failure.path)
