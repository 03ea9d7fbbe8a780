"""Training patches vote on the class of each patch: nothing is learned (Hummingbird, Balazevic et al., 2023).

Shapes used below: D channels of an h x w grid, M patches in memory, P patches that ask, K classes.
"""

import logging

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nestling.ssl.data.failures import Failure
from nestling.ssl.data.ledger import Ledger
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.dense.folder import MaskedImages, Pair
from nestling.ssl.evaluation.dense.masks import IGNORED, resized_ids
from nestling.ssl.evaluation.dense.settings import PatchKnn
from nestling.ssl.evaluation.dense.sliding import Windows
from nestling.ssl.randomness import Stream, generator

log = logging.getLogger("nestling")
ASKING, ASKED = 1024, 65536  # patches compared at once: 256 MiB of similarities


def patch_labels(mask: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """The class of most pixels of each patch, the smallest of equals; 255 where most are ignored.

    Shape:
        mask: (H, W) uint8 -> (h, w) uint8
    """
    (height, width), (high, wide) = mask.shape, grid
    rows, columns = np.arange(height) * high // height, np.arange(width) * wide // width
    cells = rows[:, None] * wide + columns
    counts = np.bincount((cells * 256 + mask).ravel(), minlength=high * wide * 256).reshape(-1, 256)
    return counts.argmax(1).astype(np.uint8).reshape(grid)


class PatchMemory:
    """Normalised training patches with their classes, at most `settings.memory` of them.

    Each image gives the same number of patches, drawn by (seed, image) alone; where there are more images
    than places, evenly chosen ones give one each. Ignored patches are never in.

    Raises:
        UserError: no image gives a labelled patch, or a mask is wrong.
    """

    def __init__(
        self,
        pairs: MaskedImages,
        windows: Windows,
        num_classes: int,
        settings: PatchKnn,
        ledger: Ledger,
        seed: int = 0,
    ) -> None:
        self.num_classes, self.settings = num_classes, settings
        failures: list[Failure] = []
        self._pairs, self._windows, self._seed = pairs, windows, seed
        share = max(1, settings.memory // len(pairs))
        chosen = np.arange(len(pairs))[:: -(-len(pairs) // settings.memory)]
        parts = []
        for index in chosen.tolist():
            pair, failed = pairs.read(index)
            failures += failed
            ledger.refuse_above(len(failures))
            if pair is not None:
                parts.append(self._patches_of(index, pair, share))
        ledger.exchange(failures)
        if not sum(len(labels) for _, labels in parts):
            raise UserError("no training image could be read and has a labelled patch")
        self.features = torch.cat([features for features, _ in parts]).to(windows.device)
        self.labels = torch.cat([labels for _, labels in parts]).to(windows.device)
        self.k = min(settings.k, len(self.labels))
        if self.k < settings.k:
            log.warning("knn.k=%d became %d, the number of patches in memory", settings.k, self.k)

    def _patches_of(self, index: int, pair: Pair, share: int) -> tuple[Tensor, Tensor]:
        """Shape: -> (m, D) float16, (m,) int64."""
        self._pairs.check_ids(index, pair.mask, self.num_classes)
        mask, size = resized_ids(pair.mask, *self._windows.shape(*pair.mask.shape)), self._windows.size
        features, labels = list[Tensor](), list[np.ndarray]()
        for corners, maps in self._windows.maps(pair.image):
            grid = (maps.shape[2], maps.shape[3])
            features.append(F.normalize(maps.flatten(2).mT, dim=2).flatten(0, 1).half().cpu())
            areas = [mask[top : top + size, left : left + size] for top, left in corners]
            labels += [patch_labels(area, grid).ravel() for area in areas]
        known = np.concatenate(labels)
        places = np.flatnonzero(known != IGNORED)
        if len(places) > share:
            draw = generator(self._seed, Stream.ORDER, index)
            places = np.sort(draw.choice(places, share, replace=False))
        return torch.cat(features)[places], torch.from_numpy(known[places].astype(np.int64))

    def score(self, maps: Tensor) -> Tensor:
        """The share of the votes that each class gets.

        Shape:
            (B, D, h, w) -> (B, K, h, w)
        """
        asking = F.normalize(maps.permute(0, 2, 3, 1).flatten(0, 2), dim=1)
        votes = torch.cat([self._votes(part) for part in asking.split(ASKING)])
        return votes.unflatten(0, (maps.shape[0], *maps.shape[2:])).permute(0, 3, 1, 2)

    def _votes(self, asking: Tensor) -> Tensor:
        """Shape: (P, D) -> (P, K)."""
        best = asking.new_empty(len(asking), 0)
        nearest = torch.empty(len(asking), 0, dtype=torch.long, device=asking.device)
        for first in range(0, len(self.labels), ASKED):
            found = asking @ self.features[first : first + ASKED].to(asking.dtype).T
            found, places = found.topk(min(self.k, found.shape[1]))
            best, nearest = torch.cat([best, found], 1), torch.cat([nearest, places + first], 1)
            best, order = best.topk(min(self.k, best.shape[1]))
            nearest = nearest.gather(1, order)
        weights = (best / self.settings.temperature).softmax(dim=1)
        votes = asking.new_zeros(len(asking), self.num_classes)
        return votes.scatter_add_(1, self.labels[nearest], weights)
