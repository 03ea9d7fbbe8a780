"""What a layout must offer: how it is written, how it is loaded by its own program, where both must agree.

Shapes used below: B images, C channels, D features, N patches.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from nestling.ssl.export.sizes import Size, two_sizes
from nestling.ssl.export.subject import Subject

Network = Callable[[Tensor], tuple[Tensor, Tensor]]  # (B, C, H, W) -> cls (B, D), patches (B, N, D)


def own_size(subject: Subject) -> list[Size]:
    """The size of the run's images alone: others are for a foreign network to take or not."""
    return [(subject.side, subject.side)]


class Target(ABC):
    """One layout.

    `loader` is the package that loads it, None where none is needed; `tolerance` the largest difference
    in fp32 that passes, in units of the largest feature where that is above 1.
    """

    name: ClassVar[str]
    loader: ClassVar[str | None] = None
    packages: ClassVar[tuple[str, ...]] = ()  # whose versions are recorded
    tolerance: ClassVar[float] = 1e-4

    @abstractmethod
    def write(self, subject: Subject, folder: Path) -> dict[str, Any]:
        """Write the files into an empty folder; returns what the record should say besides.

        Raises:
            UserError: the layout can't hold this backbone, or a package to write it is missing.
        """

    @abstractmethod
    def read(self, subject: Subject, folder: Path) -> Network:
        """What was written of `subject`, loaded as its users would, and able to give no gradient.

        torch picks other kernels, and so other last bits, for weights that require one.

        Raises:
            UserError, ValueError, OSError: it can't be loaded.
        """

    def sizes(self, subject: Subject) -> list[Size]:
        """Heights and widths at which the loaded network must agree."""
        return two_sizes(subject.backbone, subject.side) if subject.is_built_in else own_size(subject)

    def can_read(self) -> bool:
        """Whether the package that loads it is installed."""
        return self.loader is None or find_spec(self.loader) is not None
