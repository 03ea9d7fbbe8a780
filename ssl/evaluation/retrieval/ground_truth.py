"""Which images show what each query shows: the files of revisited Oxford and Paris (Radenovic et al., 2018).

A pickle may run any code that its author likes. Here it may build plain containers, numbers, text and numpy
arrays, and nothing else.
"""

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nestling.ssl.errors import UserError
from nestling.ssl.names import printable

LEVELS = ("easy", "hard", "junk")


@dataclass(frozen=True)
class Query:
    """An image asked about, the part of it that counts, and the places of images in the list of all.

    Shape:
        easy, hard, junk: (n,) int64 each; box: left, top, right, bottom
    """

    name: str
    box: tuple[float, float, float, float] | None
    easy: np.ndarray
    hard: np.ndarray
    junk: np.ndarray


@dataclass(frozen=True)
class GroundTruth:
    """All images that are searched, and the queries."""

    images: list[str]
    queries: list[Query]


def read_ground_truth(path: str | Path) -> GroundTruth:
    """A `gnd_*.pkl`, or the same content as JSON.

    `imlist` and `qimlist` name images, and `gnd` holds for each query `easy`, `hard`, `junk` (places in
    `imlist`) and `bbx` (left, top, right, bottom, in pixels).

    Raises:
        UserError: it can't be read, holds more than plain data, or isn't of that form.
    """
    path = Path(path).expanduser()
    shown = printable(path)
    try:
        if path.suffix.lower() == ".json":
            content = json.loads(path.read_text(encoding="utf-8"))
        else:
            with path.open("rb") as file:
                content = _Plain(file, shown).load()
    except UserError:
        raise
    except Exception as error:  # a broken pickle raises anything
        raise UserError(f"{shown} can't be read as ground truth: {error}") from error
    return _checked(content, shown)


def find_ground_truth(folder: Path) -> Path:
    """The one file gnd_*.pkl or gnd_*.json of a folder.

    Raises:
        UserError: there are none or several.
    """
    found = sorted([*folder.glob("gnd_*.pkl"), *folder.glob("gnd_*.json")])
    if len(found) != 1:
        names = ", ".join(printable(path.name) for path in found) or "none"
        raise UserError(
            f"folder={printable(folder)} holds {len(found)} files gnd_*.pkl or gnd_*.json ({names}); "
            "name one with ground_truth=FILE"
        )
    return found[0]


def _latin1(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes in old pickles."""
    if encoding != "latin1":
        raise ValueError(f"unexpected encoding {encoding}")
    return text.encode("latin1")


def _allowed() -> dict[tuple[str, str], Callable[..., Any]]:
    """What may be called, by the names that numpy 1 and 2 give it."""
    array = np.zeros(1)
    rebuild, from_buffer = array.__reduce__()[0], array.__reduce_ex__(5)[0]
    scalar = np.float64(0).__reduce__()[0]
    found: dict[tuple[str, str], Callable[..., Any]] = {
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): _latin1,
    }
    for core in ("numpy.core", "numpy._core"):
        found[f"{core}.multiarray", "_reconstruct"] = rebuild  # type: ignore[assignment]
        found[f"{core}.multiarray", "scalar"] = scalar
        found[f"{core}.numeric", "_frombuffer"] = from_buffer  # type: ignore[assignment]
    return found


class _Plain(pickle.Unpickler):
    """Builds what `_allowed` names and refuses all else before it is imported."""

    def __init__(self, file: Any, shown: str) -> None:
        super().__init__(file, encoding="latin1")  # of Python 2, which wrote the published files
        self._shown, self._allowed = shown, _allowed()

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._allowed[module, name]
        except KeyError:
            raise UserError(
                f"{self._shown} asks for {module}.{name}, which plain ground truth never needs, so it is not "
                "loaded: a pickle can run code; get it anew from its source, or write the content as JSON"
            ) from None


def _checked(content: Any, shown: str) -> GroundTruth:
    if not isinstance(content, Mapping) or not {"imlist", "qimlist", "gnd"} <= set(content):
        raise UserError(f"{shown} is no ground truth: it must be a dict with imlist, qimlist and gnd")
    images, names, entries = ([*content[name]] for name in ("imlist", "qimlist", "gnd"))
    if not images or not names or not all(isinstance(name, str) for name in [*images, *names]):
        raise UserError(f"{shown}: imlist and qimlist must be lists of names of images, at least one each")
    if len(names) != len(entries):
        raise UserError(f"{shown}: qimlist has {len(names)} queries and gnd {len(entries)}; they must agree")
    queries = [_query(*pair, len(images), shown) for pair in zip(names, entries, strict=True)]
    return GroundTruth([str(name) for name in images], queries)


def _query(name: str, entry: Any, num_images: int, shown: str) -> Query:
    missing = [level for level in LEVELS if not isinstance(entry, Mapping) or level not in entry]
    if missing:
        raise UserError(f"{shown}: the entry of the query {printable(name)} lacks {', '.join(missing)}")
    easy, hard, junk = (
        _places(entry[level], num_images, f"{shown}: {printable(name)}: {level}") for level in LEVELS
    )
    if len(np.unique(np.concatenate([easy, hard, junk]))) < len(easy) + len(hard) + len(junk):
        raise UserError(f"{shown}: an image stands twice among easy, hard and junk of {printable(name)}")
    return Query(name, _box(entry.get("bbx"), f"{shown}: bbx of {printable(name)}"), easy, hard, junk)


def _places(values: Any, num_images: int, where: str) -> np.ndarray:
    try:
        places = np.asarray(values, dtype=np.float64).ravel()
    except (TypeError, ValueError):
        raise UserError(f"{where} must be a list of places in imlist") from None
    whole = places.astype(np.int64)
    if (whole != places).any() or (whole < 0).any() or (whole >= num_images).any():
        raise UserError(f"{where} must hold places in imlist, whole numbers from 0 to {num_images - 1}")
    return whole


def _box(values: Any, where: str) -> tuple[float, float, float, float] | None:
    if values is None:
        return None
    try:
        left, top, right, bottom = (float(value) for value in np.asarray(values, dtype=np.float64).ravel())
    except (TypeError, ValueError):
        left, top, right, bottom = 0.0, 0.0, 0.0, 0.0
    if not (left < right and top < bottom):
        raise UserError(
            f"{where} must be left, top, right, bottom in pixels, left below right, top below bottom"
        )
    return left, top, right, bottom


def image_path(folder: Path, name: str, endings: Sequence[str]) -> str:
    """The file of an image; names without a known ending are those of JPEGs, as in the published lists."""
    return str(folder / (name if name.lower().endswith(tuple(endings)) else f"{name}.jpg"))
