"""Where images come from: each source numbers its images and loads one by its number."""

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from nestling.ssl.config import Config
from nestling.ssl.data.decoding import decode
from nestling.ssl.data.packed import PackedPaths
from nestling.ssl.errors import UserError
from nestling.ssl.randomness import Stream, generator

LOOKED_FOR = ".avif .bmp .gif .jfif .jp2 .jpeg .jpg .pbm .pgm .png .pnm .ppm .tga .tif .tiff .webp"
EXTENSIONS = frozenset(LOOKED_FOR.split())
MAX_HELD_OUT = 5000
LEFT_OUT = ("__MACOSX",)  # and every name that begins with a dot


class ImageSource(ABC):
    """Numbered images; picklable, so that it reaches loader processes however they start."""

    name: str
    labels: np.ndarray | None  # (N,) int64, indices into class_names
    class_names: list[str] | None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def path(self, index: int) -> str:
        """A stable name of the image, its file where it has one."""

    @abstractmethod
    def load(self, index: int) -> np.ndarray:
        """The image, (H, W, 3) uint8 RGB, upright; not to be written to."""


class Folder(ImageSource):
    """All images below a folder, in any nesting, in an order that the file system can't change.

    Hidden entries and `__MACOSX` are left out. Links are followed; a folder that several links
    lead to is read once, so that loops end. Labels exist where every image lies below one of at
    least two first-level subfolders: those are the classes.

    Raises:
        UserError: there is no such folder, or no image in it.
    """

    def __init__(self, root: str, key: str = "data.train") -> None:
        if not os.path.isdir(root):
            found = "a file" if os.path.exists(root) else "nothing"
            raise UserError(f"{key}={root} is not a folder: found {found} there; name a folder of images")
        self.name = str(root)
        self._root = os.path.abspath(root)
        try:
            images, others = _scan(self._root)
        except OSError as error:
            raise UserError(f"{key}={root} can't be read: {error.strerror} ({error.filename})") from error
        if not images:
            raise UserError(f"{key}={root}: no images; {_what_was_seen(others)}")
        images.sort(key=_by_parts)
        self._paths = PackedPaths(images)
        self.labels, self.class_names = _labels(images)

    def __len__(self) -> int:
        return len(self._paths)

    def path(self, index: int) -> str:
        return os.path.join(self._root, self._paths[index])

    def load(self, index: int) -> np.ndarray:
        return decode(self.path(index))


class Subset(ImageSource):
    """Some images of a source, renumbered in the order of `indices`."""

    def __init__(self, source: ImageSource, indices: Sequence[int] | np.ndarray) -> None:
        self.source = source
        self.indices = np.asarray(indices, dtype=np.int64)
        self.name = source.name
        self.labels = None if source.labels is None else source.labels[self.indices]
        self.class_names = source.class_names

    def __len__(self) -> int:
        return len(self.indices)

    def path(self, index: int) -> str:
        return self.source.path(int(self.indices[index]))

    def load(self, index: int) -> np.ndarray:
        return self.source.load(int(self.indices[index]))


def holdout(source: ImageSource, share: float, seed: int) -> tuple[Subset, Subset]:
    """Split into a part to train on and a part to judge with, of 1 to 5000 images.

    More would not tell more, and cost training images and time. Every index has its own draw; the
    `share` with the smallest draws is held out. So an image added at the end moves at most one other.

    Raises:
        UserError: fewer than two images.
    """
    count = len(source)
    if share == 0:
        return Subset(source, np.arange(count)), Subset(source, [])
    if count < 2:
        raise UserError(f"{source.name}: {count} image can't be split by data.holdout={share}; set it to 0")
    draws = generator(seed, Stream.HOLDOUT).random(count)
    held = np.zeros(count, dtype=bool)
    num_held = min(max(round(share * count), 1), count - 1, MAX_HELD_OUT)
    held[np.argsort(draws, kind="stable")[:num_held]] = True
    return Subset(source, np.flatnonzero(~held)), Subset(source, np.flatnonzero(held))


def open_source(spec: str, split: str) -> ImageSource:
    """The source that `data.train` or `data.val` names; `split` is "train" or "val"."""
    assert split in ("train", "val"), split
    if spec == "photo-tiles":
        from nestling.ssl.data.photo_tiles import PhotoTiles  # which itself builds on this module

        return PhotoTiles(split)
    return Folder(os.path.expanduser(spec), key=f"data.{split}")


def open_pair(cfg: Config) -> tuple[ImageSource, ImageSource | None]:
    """What to train on, and what k-NN queries: `data.val`, else a held-out part of labelled images.

    The second is None where there is neither.
    """
    train = open_source(cfg.data.train, "train")
    if cfg.data.val is not None:
        return train, open_source(cfg.data.val, "val")
    if cfg.data.train == "photo-tiles":
        return train, open_source(cfg.data.train, "val")
    if train.labels is None or cfg.data.holdout == 0:
        return train, None
    return holdout(train, cfg.data.holdout, cfg.seed)


def _scan(root: str) -> tuple[list[str], list[str]]:
    """Relative paths, with forward slashes, of the images and of the other files."""
    images: list[str] = []
    others: list[str] = []
    for entry in _walk(root):
        relative = Path(os.path.relpath(entry, root)).as_posix()
        is_image = os.path.splitext(entry)[1].lower() in EXTENSIONS
        (images if is_image else others).append(relative)
    return images, others


def _walk(root: str) -> Iterator[str]:
    """Every file below a folder; each folder once, by its real place where it has one below."""
    seen: set[tuple[int, int]] = set()
    folders, links = [root], deque[str]()
    while folders or links:
        folder = folders.pop() if folders else links.popleft()
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(folder) as entries:
            kept = [
                entry for entry in entries if not entry.name.startswith(".") and entry.name not in LEFT_OUT
            ]
        for entry in sorted(kept, key=_by_name):
            if entry.is_dir():
                (links if entry.is_symlink() else folders).append(entry.path)
            elif entry.is_file():
                yield entry.path


def _by_name(entry: os.DirEntry[str]) -> bytes:
    return os.fsencode(entry.name)


def _by_parts(path: str) -> list[bytes]:
    return os.fsencode(path).split(b"/")


def _labels(images: list[str]) -> tuple[np.ndarray | None, list[str] | None]:
    """One label per image by its first-level folder, or None where that makes no classes."""
    folders = [path.split("/", 1)[0] if "/" in path else None for path in images]
    names = sorted({folder for folder in folders if folder is not None}, key=os.fsencode)
    if None in folders or len(names) < 2:
        return None, None
    number = {name: label for label, name in enumerate(names)}
    return np.array([number[str(folder)] for folder in folders], dtype=np.int64), names


def _what_was_seen(others: list[str]) -> str:
    if not others:
        return f"looked for {LOOKED_FOR} at any depth and saw no file at all"
    example = os.fsencode(min(others, key=os.fsencode)).decode("utf-8", "backslashreplace")
    return f"looked for {LOOKED_FOR} at any depth and saw {len(others)} other files, e.g. {example}"
