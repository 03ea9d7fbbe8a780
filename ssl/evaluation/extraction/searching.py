"""The images of an extraction that are most like another one, as numbers and as a picture.

Shapes used below: n rows, b rows of a block, D features, k neighbours.
"""

import copy
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from nestling.ssl.data.sources.base import ImageSource
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation import canvas
from nestling.ssl.evaluation.embedding import Embedder
from nestling.ssl.evaluation.extraction import formats
from nestling.ssl.evaluation.extraction.forward import GRID
from nestling.ssl.evaluation.extraction.images import opened
from nestling.ssl.evaluation.extraction.plan import FEATURES, ROWS
from nestling.ssl.evaluation.extraction.settings import FORMATS
from nestling.ssl.evaluation.knn import search
from nestling.ssl.evaluation.pictures import as_rgb
from nestling.ssl.names import printable
from nestling.ssl.run.directory import writable
from nestling.ssl.trained import load_trained, weights_sha256

PICTURES = (".png", ".jpg", ".jpeg", ".webp")
WIDE = 10_000  # columns of a file or a pipe
SIDE, GAP, PER_ROW = 150, 12, 5  # pixels of a tile and between tiles; tiles of a line


@dataclass(frozen=True)
class Found:
    """A row of the extraction, the image it belongs to with its number in the dataset, and the cosine."""

    row: int
    index: int
    path: str
    label: str | None
    similarity: float

    def caption(self) -> str:
        """What is written below its picture."""
        return f"{self.similarity:.3f}  {printable(self.label or Path(self.path).name)}"


class FeatureFolder:
    """A finished extraction; `facts` is what its features.json says.

    A file of vectors in it, such as cls.faiss, stands for its folder and its pooling.

    Raises:
        UserError: the folder holds none, or none of that pooling, or the file is none of it.
    """

    def __init__(self, folder: str | Path, pooling: str | None = None) -> None:
        self.folder = Path(folder).expanduser()
        file = self.folder if self.folder.is_file() else None
        if file is not None:
            self.folder = file.parent
        try:
            self.facts: dict[str, Any] = json.loads((self.folder / FEATURES).read_text(encoding="utf-8"))
            named = [name for name in self.facts["shapes"] if name != GRID]
        except (OSError, ValueError, KeyError):
            what = f"{printable(self.folder)} holds" if file is None else f"{printable(file)} lies in"
            raise UserError(
                f"{what} no finished extraction ({FEATURES}); "
                "recipes/extract_features.py makes one: give its folder"
            ) from None
        if file is not None:
            pooling = _pooling_of(file, named, pooling)
        if not named or pooling not in (None, *named):
            raise UserError(
                f"pooling={pooling or GRID}: {printable(self.folder)} has vectors of "
                f"{', '.join(named) or 'none'}; choose one of them, or extract it"
            )
        self.pooling = pooling or named[0]

    def embedder(self, checkpoint: str | None = None) -> Embedder:
        """The backbone that made it, cutting images as it did; `checkpoint` says where it lies now.

        Raises:
            UserError: it isn't there, or has other weights.
        """
        place = checkpoint or self.facts["checkpoint"]
        if not Path(place).expanduser().exists():
            raise UserError(f"{printable(place)} is gone; give the same weights as checkpoint=PATH")
        trained = load_trained(place, self.facts["network"] or "teacher")
        if weights_sha256(trained.file) != self.facts["sha256"]:
            raise UserError(
                f"the weights in {printable(trained.file)} are not those that made {printable(self.folder)}: "
                "vectors of other weights can't be compared; give theirs as checkpoint=PATH, or extract anew"
            )
        return Embedder(trained, self.facts["size"], self.facts["crop_ratio"])

    def vectors(self) -> Iterable[np.ndarray]:
        """The vectors of the pooling, block by block, from the first of its files.

        Shape:
            each (b, D)
        """
        kind = next(kind for kind in FORMATS if kind in self.facts["formats"] and formats.holds(kind, "cls"))
        return formats.vectors(self.folder / formats.file_name(self.pooling, kind), kind)

    def nearest(self, query: np.ndarray, k: int) -> list[Found]:
        """The k rows of largest cosine to a vector, the most alike first.

        Shape:
            query: (D,)
        """
        similarities, rows = nearest(self.vectors(), query, k)
        wanted = dict.fromkeys(rows.tolist())
        with (self.folder / ROWS).open(encoding="utf-8") as lines:
            said = {}
            for row, line in enumerate(islice(lines, max(wanted) + 1)):
                if row in wanted:
                    said[row] = json.loads(line)
        return [
            Found(row, said[row]["index"], said[row]["path"], said[row]["label"], similarity)
            for row, similarity in zip(rows.tolist(), similarities.tolist(), strict=True)
        ]

    def images(self, found: Sequence[Found], model: Embedder) -> list[np.ndarray | None]:
        """The images of rows as they are read now; None for one that is gone.

        Those that are no files of their own, as in tar shards, come from the data set as it was named.
        """
        source: ImageSource | None = None
        images: list[np.ndarray | None] = []
        for item in found:
            try:
                if source is None and not Path(item.path).exists():
                    source = self._source(model)
                images.append(model.read(item.path) if source is None else source.load(item.index))
            except (UserError, IndexError):
                images.append(None)
        return images

    def _source(self, model: Embedder) -> ImageSource:
        config = copy.deepcopy(model.trained.config)
        for name, value in self.facts["settings"]["data"].items():
            if value is not None:
                setattr(config.data, name, value)
        return opened(config, self.facts["settings"]["split"])


def _pooling_of(file: Path, named: Sequence[str], asked: str | None) -> str:
    """The pooling whose vectors lie in a file of an extraction that has those `named`."""
    files = {formats.file_name(name, kind): name for name in named for kind in FORMATS}
    held = files.get(file.name)
    if held is None:
        what = f"is no file of vectors ({', '.join(named) or 'none'} were extracted)"
    elif asked not in (None, held):
        what = f"holds {held}, not pooling={asked}"
    else:
        return held
    raise UserError(f"{printable(file)} {what}; give its folder, {printable(file.parent)}")


def nearest(blocks: Iterable[np.ndarray], query: np.ndarray, k: int) -> tuple[Tensor, Tensor]:
    """The k rows of largest cosine, exactly, equal ones by smallest row; all rows where there are fewer.

    Shape:
        blocks: each (b, D), query: (D,) -> similarities (k,), rows (k,)
    """
    best, rows, start = torch.empty(0), torch.empty(0, dtype=torch.long), 0
    wanted = torch.from_numpy(np.array(query, np.float32))[None]
    for block in blocks:
        if not len(block):
            continue
        candidates = torch.from_numpy(np.array(block, np.float32))
        similarities, indices = search(candidates, wanted, min(k, len(block)), backend="torch")
        best = torch.cat([best, similarities[0]])
        rows = torch.cat([rows, indices[0] + start])
        order = best.argsort(descending=True, stable=True)[:k]
        best, rows, start = best[order], rows[order], start + len(block)
    return best, rows


def show(found: Sequence[Found], image: str) -> None:
    """The table; paths stay whole, in a pipe on one line too."""
    console = Console()
    table = Table(
        "row", "similarity", "label", title=f"nearest to {escape(printable(image))}", title_justify="left"
    )
    table.add_column("path", overflow="fold")
    for item in found:
        cells = (f"{item.similarity:.4f}", printable(item.label or "–"), printable(item.path))
        table.add_row(str(item.row), *map(escape, cells))
    (console if console.is_terminal else Console(width=WIDE)).print(table)


def picture_file(out: str) -> Path:
    """Where the picture goes.

    Raises:
        UserError: the ending is of no kind of picture, or nothing can be written there.
    """
    path = Path(out).expanduser()
    if path.suffix.lower() not in PICTURES:
        raise UserError(f"out={printable(out)} must end in one of {', '.join(PICTURES)}")
    return writable(path)


def drawn(query: np.ndarray, images: Sequence[np.ndarray | None], found: Sequence[Found]) -> Image.Image:
    """The image, then those that are like it with their cosines; a gray tile for one that is gone.

    Shape:
        images (H, W, C) uint8
    """
    tiles = [_captioned(image, item.caption()) for image, item in zip(images, found, strict=True)]
    lines = [canvas.beside(tiles[start : start + PER_ROW], GAP) for start in range(0, len(tiles), PER_ROW)]
    page = canvas.beside([_captioned(query, "looked for"), canvas.stacked(lines, GAP)], 3 * GAP)
    return canvas.margin(page, 2 * GAP)


def _captioned(image: np.ndarray | None, caption: str) -> Image.Image:
    page = Image.new("RGB", (SIDE, SIDE + canvas.SMALL + 8), canvas.WHITE)
    square = Image.new("RGB", (SIDE, SIDE), canvas.LIGHT)
    page.paste(square if image is None else canvas.tile(as_rgb(image), SIDE), (0, 0))
    text = canvas.shortened(caption, canvas.SMALL, SIDE)
    ImageDraw.Draw(page).text((0, SIDE + 4), text, canvas.INK, canvas.font(canvas.SMALL))
    return page
