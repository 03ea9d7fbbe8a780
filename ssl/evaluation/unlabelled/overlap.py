"""Whether two networks find the same images alike.

Shapes used below: N images, D and E channels, k neighbours.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from nestling.ssl.distributed import everyones, failing_together, is_main, patiently
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.features import Rows
from nestling.ssl.evaluation.knn.backends import resolved
from nestling.ssl.evaluation.knn.exact import Exact, unit_rows
from nestling.ssl.evaluation.knn.voting import clamping

log = logging.getLogger("nestling")


def knn_overlap(first: Tensor, second: Tensor, k: int, backend: str = "auto") -> dict[str, float]:
    """Means over the images of what the k nearest others in `first` and in `second` share.

    `overlap` is |A & B| / k, the mutual k-NN metric of Huh et al. (2024); `jaccard` is |A & B| / |A | B|.
    Two networks that have nothing in common reach about k / (N - 1) and half of that.

    Shape:
        first: (N, D), second: (N, E), any float type; row i of both is image i

    Raises:
        UserError: fewer than k other images.
    """
    return knn_overlaps(first, second, [k], backend)[k]


def knn_overlaps(
    first: Tensor, second: Tensor, ks: Sequence[int], backend: str = "auto"
) -> dict[int, dict[str, float]]:
    """`knn_overlap` for several k by one search of each side: the nearest of a smaller k come first."""
    count, most = len(first), max(ks)
    assert len(second) == count, "row i of both is image i"
    if not 1 <= min(ks) <= most < count:
        wrong = most if most >= count else min(ks)
        raise UserError(f"k={wrong} nearest others of {count} images; give 1 to {count - 1}")
    sides = [_nearest_others(features, most, resolved(backend)) for features in (first, second)]
    found = {}
    for k in ks:
        one, other = (side[:, :k] for side in sides)
        shared = (one[:, :, None] == other[:, None, :]).sum(dim=(1, 2)).double()
        found[k] = {
            "overlap": float((shared / k).mean()),
            "jaccard": float((shared / (2 * k - shared)).mean()),
        }
    return found


def _nearest_others(features: Tensor, k: int, backend: str) -> Tensor:
    """Shape: (N, D) -> (N, k) int64, never the image itself."""
    rows, numbers = unit_rows(features), torch.arange(len(features))
    return Exact(rows, numbers, backend, None, 1)(rows, numbers, k)[1]


def nearest_images(rows: Rows, k: int, backend: str = "auto") -> dict[str, Tensor]:
    """Each image and its k nearest others, by number in the dataset, under each pooling.

    Small enough to be kept: 44 bytes an image for k=10. With fewer others all of them; {} for a single image.

    Shape:
        {pooling: (n, 1 + k) int32}
    """
    k = min(k, len(rows.indices) - 1)
    if k < 1:
        return {}
    numbers = rows.indices.int()
    return {
        pooling: torch.cat([numbers[:, None], numbers[_nearest_others(vectors, k, resolved(backend))]], dim=1)
        for pooling, vectors in rows.vectors.items()
    }


def overlap_of(before: Tensor, now: Tensor) -> float | None:
    """The overlap of what `nearest_images` found twice, over the images that are in both; None without one.

    Shape:
        (n, 1 + k), (m, 1 + k)
    """
    k = min(before.shape[1], now.shape[1]) - 1
    before, now = before[torch.isin(before[:, 0], now[:, 0])], now[torch.isin(now[:, 0], before[:, 0])]
    if not len(now):
        return None
    shared = (before[:, 1 : 1 + k, None] == now[:, None, 1 : 1 + k]).sum(dim=(1, 2)).double()
    return float((shared / k).mean())


def overlaps(first: Rows, second: Rows, ks: Sequence[int], backend: str = "auto") -> dict[str, float]:
    """`knn_overlap` of the images that both could read, as `features/overlap/cls_k10`; on all processes.

    A k of more than the other images becomes that number, which is said.
    """
    values: dict[str, float] = {}
    with failing_together(), patiently():
        if is_main():
            kept = [
                torch.isin(one.indices, other.indices) for one, other in ((first, second), (second, first))
            ]
            usable = _usable(ks, int(kept[0].sum()) - 1)
            for pooling in first.vectors:
                sides = first.vectors[pooling][kept[0]], second.vectors[pooling][kept[1]]
                for k, shares in knn_overlaps(*sides, usable, backend).items():
                    for name, value in shares.items():
                        values[f"features/{name}/{pooling}_k{k}"] = value
    return everyones([values])[0]  # the main process comes first


def _usable(ks: Sequence[int], num_others: int) -> list[int]:
    if num_others < 1:
        raise UserError("neighbours can't be compared: fewer than two images could be read by both networks")
    if max(ks) > num_others:
        log.warning("each image has only %d others, so %s", num_others, clamping(ks, num_others))
    return list(dict.fromkeys(min(k, num_others) for k in ks))
