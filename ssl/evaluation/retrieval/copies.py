"""Copy detection: does an altered image find its original? As DINO on Copydays (Douze et al., 2009).

Shapes used below: B images, Q queries, N images that are searched, D channels.
"""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nestling.backbones import Backbone, Features
from nestling.ssl.config import Data
from nestling.ssl.data.channels import normalisation
from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.failures import Failure
from nestling.ssl.data.ledger import Ledger
from nestling.ssl.data.loader import EvalLoader
from nestling.ssl.data.sources.base import ImageSource
from nestling.ssl.data.sources.folder import Folder
from nestling.ssl.data.workers import default_workers
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.features import untouched
from nestling.ssl.evaluation.retrieval.ranking import average_precision, order
from nestling.ssl.evaluation.retrieval.whitening import Whitening
from nestling.ssl.names import printable
from nestling.ssl.views.evaluation import resized
from nestling.ssl.views.render import normalize

ORIGINAL = "original"
POWER, SMALLEST = 4.0, 1e-6  # of GeM, as in DINO
AT_ONCE = 256  # queries compared at once


@dataclass(frozen=True)
class Squeezed:
    """The whole image as a square, whatever its shape, as DINO shows it."""

    side: int

    @property
    def size(self) -> tuple[int, int]:
        return self.side, self.side

    def __call__(self, image: np.ndarray, index: int) -> np.ndarray:
        """Shape: (H, W, C) uint8 -> (C, side, side) uint8."""
        return np.ascontiguousarray(resized(image, self.side, self.side).transpose(2, 0, 1))


def copy_vector(features: Features) -> Tensor:
    """The class token and the generalised mean of the patches, side by side (DINO, section 4.2).

    GeM (Radenovic et al., 2018): the fourth root of the mean of fourth powers, of positive values alone.

    Shape:
        -> (B, 2 D) float32
    """
    patches = features.patches.float().clamp(min=SMALLEST)
    pooled = patches.pow(POWER).mean(1).pow(1 / POWER)
    return torch.cat([features.cls.float(), pooled], dim=1)


def describe(
    source: ImageSource,
    backbone: Backbone,
    data: Data,
    size: int,
    batch_size: int,
    device: torch.device,
    ledger: Ledger,
) -> tuple[np.ndarray, Tensor]:
    """The readable images of a source and their vectors; the others are entered in `ledger`.

    Shape:
        -> (n,) int64, (n, 2 D) float32 on the CPU

    Raises:
        UserError: too many images can't be read, or a vector is not finite.
    """
    workers = default_workers() if data.num_workers is None else data.num_workers
    loader = EvalLoader(source, data, Squeezed(size), batch_size, num_workers=workers, ledger=ledger)
    indices, vectors, failures = list[Tensor](), list[Tensor](), list[Failure]()
    with untouched(backbone), torch.no_grad():
        backbone.eval()
        for batch in loader:
            failures += batch.failures
            if len(batch.indices):
                pixels = normalize(batch.images.to(device), *normalisation(data))
                vectors.append(copy_vector(backbone(pixels)).cpu())
                indices.append(batch.indices)
    ledger.exchange(failures)
    if not vectors:
        raise UserError(f"no image in {printable(source.name)} can be read")
    found, places = torch.cat(vectors), torch.cat(indices).numpy()
    bad = (~found.isfinite().all(1)).nonzero()
    if len(bad):
        path = printable(source.path(int(places[bad[0, 0]])))
        raise UserError(f"the features of {path} are not finite; is the backbone sound?")
    return places, found


def open_folders(paths: Mapping[str, str | None], data: Data) -> dict[str, ImageSource]:
    """The images of each folder that is given; `folder` comes first.

    Raises:
        UserError: one can't be read, or lies in `folder`, where it would be taken for altered images.
    """
    sources: dict[str, ImageSource] = {}
    for name, path in paths.items():
        if path is None:
            continue
        place, root = Path(path).expanduser(), Path(paths["folder"] or "").expanduser()
        if name != "folder" and place.resolve().is_relative_to(root.resolve()):
            raise UserError(f"{name}={printable(path)} lies in folder={printable(root)}; keep them apart")
        sources[name] = Folder(str(place), Decoder.of(data), name, data.cache)
    return sources


def blocks_of(source: ImageSource, folder: str) -> dict[str, list[int]]:
    """The images of each folder below the root, `original` first.

    Raises:
        UserError: there is no folder `original`, or nothing beside it.
    """
    blocks: dict[str, list[int]] = defaultdict(list)
    root = Path(folder).expanduser()
    for index in range(len(source)):
        place = os.path.relpath(source.path(index), os.path.abspath(root))  # paths may keep a ..
        blocks[os.path.dirname(place) or "."].append(index)
    if ORIGINAL not in blocks or len(blocks) < 2:
        raise UserError(
            f"folder={printable(root)} must hold a folder {ORIGINAL} with images and at least one of altered "
            f"ones, such as strong or jpegqual/3; found {', '.join(map(printable, sorted(blocks)[:5]))}"
        )
    return {ORIGINAL: blocks.pop(ORIGINAL), **blocks}


def judge_copies(
    vectors: dict[int, Tensor],
    blocks: dict[str, list[int]],
    source: ImageSource,
    others: Tensor,
    whitening: Whitening | None,
    prefix: int,
    depth: int,
) -> dict[str, float]:
    """mAP of each block's images searching among the originals and `others`.

    An original belongs to a query whose file name begins with the same `prefix` letters. Originals beyond
    place `depth` count as not found. What couldn't be read is neither asked nor searched.

    Shape:
        vectors: (D,) of each readable image; others: (M, D), of images that nothing was copied from

    Raises:
        UserError: a query without an original.
    """
    originals = [index for index in blocks[ORIGINAL] if index in vectors]
    if not originals:
        raise UserError(f"no image of {ORIGINAL} can be read")
    keys = [beginning(source, index, prefix) for index in originals]
    database = _unit(torch.cat([torch.stack([vectors[index] for index in originals]), others]), whitening)
    every = {beginning(source, index, prefix) for index in blocks[ORIGINAL]}
    results: dict[str, float] = {}
    for name, block in blocks.items():
        for index in block:
            if beginning(source, index, prefix) not in every:
                raise UserError(
                    f"{printable(source.path(index))} has no original: none begins with "
                    f"{printable(beginning(source, index, prefix))} (prefix={prefix})"
                )
        asked = [index for index in block if index in vectors and beginning(source, index, prefix) in keys]
        if asked:
            wanted = [
                [place for place, key in enumerate(keys) if key == beginning(source, index, prefix)]
                for index in asked
            ]
            queries = _unit(torch.stack([vectors[index] for index in asked]), whitening)
            results[name] = float(np.mean(precisions(queries, database, wanted, depth)))
    return results


def precisions(queries: Tensor, database: Tensor, wanted: Sequence[Sequence[int]], depth: int) -> list[float]:
    """The average precision of each query over the first `depth` places.

    Shape:
        queries: (Q, D), database: (N, D), both of length 1
    """
    found: list[float] = []
    for first in range(0, len(queries), AT_ONCE):
        similarities = (queries[first : first + AT_ONCE] @ database.T).numpy()
        for row, positives in zip(order(similarities), wanted[first:], strict=False):
            ranks = np.flatnonzero(np.isin(row[:depth], positives))
            found.append(average_precision(ranks, len(positives)))
    return found


def beginning(source: ImageSource, index: int, prefix: int) -> str:
    """The first letters of an image's file name, which a copy shares with its original."""
    return Path(source.path(index)).stem[:prefix]


def _unit(vectors: Tensor, whitening: Whitening | None) -> Tensor:
    """Whitened where asked for, then of length 1; float64, so that ties are real ones."""
    return F.normalize(vectors.double() if whitening is None else whitening(vectors), dim=1)
