"""The two views of an image whose features are compared where there are no labels."""

from dataclasses import dataclass, replace

import numpy as np

from nestling.ssl.config import Views
from nestling.ssl.randomness import Stream, generator
from nestling.ssl.views.plan import draw
from nestling.ssl.views.render import render


@dataclass(frozen=True)
class GlobalView:
    """The first (`number` 0) or second (1) global view as training draws it, alike at every evaluation."""

    views: Views
    side: int
    seed: int
    number: int

    @property
    def size(self) -> tuple[int, int]:
        return self.side, self.side

    def __call__(self, image: np.ndarray, index: int) -> np.ndarray:
        """Shape: image (H, W, C) uint8, its index in the dataset -> (C, side, side) uint8."""
        random = generator(self.seed, Stream.ALIGNMENT, index)
        alone = replace(self.views, num_local=0)
        drawn = draw(random, image.shape[0], image.shape[1], alone, self.side, self.side)
        return render(drawn[self.number], image)
