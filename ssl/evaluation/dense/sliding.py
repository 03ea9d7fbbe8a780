"""Scores of every pixel of an image of any shape, from square windows that overlap.

Shapes used below: H x W pixels, S the side of a window, K classes, D channels of an h x w grid.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from nestling.backbones import Backbone
from nestling.ssl.config import Data
from nestling.ssl.data.channels import normalisation
from nestling.ssl.evaluation.dense.grids import enlarged, token_maps
from nestling.ssl.views.evaluation import resized
from nestling.ssl.views.render import normalize

Score = Callable[[Tensor], Tensor]  # (B, D, h, w) -> (B, K, h, w)
STRIDE = 2 / 3  # of the side, as in DINOv2 (341 of 512)
AT_ONCE = 16  # classes whose scores are enlarged together, which bounds the memory of a large image


class Windows:
    """The square windows that cover an image whose short side becomes `size`, and their token maps."""

    def __init__(
        self,
        backbone: Backbone,
        data: Data,
        size: int,
        num_blocks: int,
        device: torch.device,
        batch_size: int,
    ) -> None:
        self.backbone, self.size, self.num_blocks = backbone, size, num_blocks
        self.device, self.batch_size = device, batch_size
        self._mean, self._std = normalisation(data)

    def shape(self, height: int, width: int) -> tuple[int, int]:
        """The resized image: the short side is `size`."""
        scale = self.size / min(height, width)
        return max(self.size, round(height * scale)), max(self.size, round(width * scale))

    def maps(self, image: np.ndarray) -> Iterator[tuple[list[tuple[int, int]], Tensor]]:
        """Corners (top, left) of some windows and their maps; all windows in turn.

        Shape:
            image: (H, W, C) uint8 -> (B, D, h, w)
        """
        high, wide = self.shape(*image.shape[:2])
        pixels = torch.from_numpy(np.array(resized(image, high, wide))).permute(2, 0, 1)
        corners = [(top, left) for top in starts(high, self.size) for left in starts(wide, self.size)]
        for first in range(0, len(corners), self.batch_size):
            some = corners[first : first + self.batch_size]
            windows = [pixels[:, top : top + self.size, left : left + self.size] for top, left in some]
            yield some, self.tokens(torch.stack(windows))

    def tokens(self, images: Tensor) -> Tensor:
        """Shape: (B, C, S, S) uint8 -> (B, D, h, w)."""
        pixels = normalize(images.to(self.device), self._mean, self._std)
        with torch.no_grad():
            return token_maps(self.backbone, pixels, self.num_blocks)

    def predict(self, image: np.ndarray, score: Score) -> np.ndarray:
        """The best class of each pixel: the mean score of the windows over it, enlarged to the image.

        Shape:
            image: (H, W, C) uint8 -> (H, W) int64
        """
        high, wide = self.shape(*image.shape[:2])
        total, times = torch.empty(0), torch.zeros(high, wide, device=self.device)
        for corners, maps in self.maps(image):
            with torch.no_grad():
                scores = enlarged(score(maps), (self.size, self.size))
            if not len(total):
                total = scores.new_zeros(scores.shape[1], high, wide)
            for (top, left), part in zip(corners, scores, strict=True):
                down, across = slice(top, top + self.size), slice(left, left + self.size)
                total[:, down, across] += part
                times[down, across] += 1
        return best_class(total / times, (image.shape[0], image.shape[1]))


def starts(length: int, size: int) -> list[int]:
    """Where windows begin along a side: the last one ends with it.

    mmsegmentation's placement, with a stride of two thirds of the window.
    """
    stride = max(1, int(size * STRIDE))
    count = -(-max(length - size, 0) // stride) + 1
    return [min(number * stride, length - size) for number in range(count)]


def best_class(scores: Tensor, size: tuple[int, int]) -> np.ndarray:
    """Argmax of the enlarged scores, the smallest class where several are equal; a few classes at a time.

    Shape:
        scores: (K, h, w) -> (*size) int64
    """
    best = torch.full(size, -torch.inf, device=scores.device)
    winner = torch.zeros(size, dtype=torch.long, device=scores.device)
    for first in range(0, len(scores), AT_ONCE):
        values, classes = enlarged(scores[None, first : first + AT_ONCE], size)[0].max(dim=0)
        better = values > best
        best, winner = torch.where(better, values, best), torch.where(better, classes + first, winner)
    return winner.cpu().numpy()
