"""Import root; in a checkout its parts are the top-level folders ssl/, backbones/, recipes/, launch/.

A trained backbone is one call away:

    model = nestling.load("runs/pretrain")
    vectors = model.embed(["cat.jpg", "dog.jpg"])  # numpy, (2, model.dim)
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nestling.ssl.evaluation.embedding import Embedder

__version__ = "0.1.0"

_here = Path(__file__).parent
if not (_here / "ssl").is_dir():  # a checkout; in a wheel the parts lie beside this file
    __path__.append(str(_here.parent))


def load(
    path: str | os.PathLike[str],
    network: str = "teacher",
    *,
    size: int | None = None,
    crop_ratio: float | None = None,
    device: Any = "cpu",
) -> "Embedder":
    """The backbone of a run directory, of one of its checkpoints, or of a weights file, ready to embed.

    A `size` or `crop_ratio` that is not given is that at which the run was judged.

    Raises:
        ValueError: nothing is there, it is damaged, or it can't take images of that size.
    """
    from nestling.ssl.evaluation import embedding  # late: it imports torch

    return embedding.load(path, network, size=size, crop_ratio=crop_ratio, device=device)
