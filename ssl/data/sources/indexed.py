"""What sources share whose images were found once and are kept in the cache."""

from functools import cached_property

import numpy as np

from nestling.ssl.data.sources.base import ImageSource
from nestling.ssl.data.sources.cache import Remembered


class IndexedSource(ImageSource):
    """Images by an index with the array `labels`, where there are any, and facts about all of them.

    The index is read at first use: in a loader process a lost one is then an error of an image.
    """

    _index: Remembered

    @cached_property
    def labels(self) -> np.ndarray | None:  # type: ignore[override]
        """Numbers of classes, where every image has a label."""
        return np.asarray(self._index.arrays["labels"]) if "labels" in self._index.arrays else None

    @cached_property
    def class_names(self) -> list[str] | None:  # type: ignore[override]
        """The classes, where there are labels."""
        names: list[str] | None = self._index.facts["class_names"]
        return names

    @cached_property
    def passed_over(self) -> str:  # type: ignore[override]
        """What was there beside the images."""
        said: str = self._index.facts["passed_over"]
        return said
