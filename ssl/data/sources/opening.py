"""From what `data.train` and `data.val` say to the sources of a run."""

import os
import re

import numpy as np

from nestling.ssl.config import Config, Data
from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.reading import refuse_if_none_reads
from nestling.ssl.data.sources.base import ImageSource, Subset, holdout
from nestling.ssl.distributed import everyones, failing_together, is_main, patiently
from nestling.ssl.errors import UserError
from nestling.ssl.names import printable

EMBEDDED = "photo-tiles"
TORCHVISION = "torchvision:"
LISTS = (".txt", ".csv", ".parquet")
TAR = r"\.(tar|tgz|tar\.\w+)$"  # the compressed ones are refused in words
ARRAYS = (".npy", ".npz")


def open_source(data: Data, split: str, decoder: Decoder | None = None) -> ImageSource:
    """The source that `data.train` or `data.val` names; `split` is "train" or "val".

    Images are read through `decoder`, by default as `data` says.

    Raises:
        UserError: it isn't there, is of no known kind, or holds no image of `data.min_size`.
    """
    assert split in ("train", "val"), split
    spec, key = getattr(data, split), f"data.{split}"
    assert spec is not None
    source = _opened(data, spec, split, key, decoder or Decoder.of(data))
    return at_least(source, data.min_size, f"{key}={printable(spec)}")


def _opened(data: Data, spec: str, split: str, key: str, decoder: Decoder) -> ImageSource:
    """Each kind imports what it needs only where it is meant."""
    path = os.path.expanduser(spec)
    ending = os.path.splitext(path)[1].lower()
    if spec == EMBEDDED:
        from nestling.ssl.data.sources.photo_tiles import PhotoTiles

        return PhotoTiles(split, decoder)
    if spec.startswith(TORCHVISION):
        from nestling.ssl.data.sources.torchvision_sets import TorchvisionSet

        return TorchvisionSet(spec.removeprefix(TORCHVISION), split, decoder, key, data.root, data.cache)
    if os.path.isdir(path):
        from nestling.ssl.data.sources.folder import Folder

        return Folder(path, decoder, key, data.cache)
    if ending in LISTS:
        from nestling.ssl.data.sources.lists import ImageList

        return ImageList(path, decoder, key, data.cache)
    if ending in ARRAYS:
        from nestling.ssl.data.sources.arrays import ImageArray

        return ImageArray(path, split, decoder, key)
    if re.search(TAR, path, re.IGNORECASE):
        from nestling.ssl.data.sources.shards import TarShards

        return TarShards(path, decoder, key, data.cache)
    found = "a file of another kind" if os.path.exists(path) else "nothing"
    raise UserError(
        f"{key}={printable(spec)}: found {found} there; name a folder of images, a list "
        f"({', '.join(LISTS)}), an array ({', '.join(ARRAYS)}), tar shards such as shard-{{000..099}}.tar, "
        f"torchvision:NAME, or {EMBEDDED}"
    )


def at_least(source: ImageSource, min_size: int, said: str) -> ImageSource:
    """The images whose shorter side is at least that, and those whose header can't be read.

    `said` is the setting that names the source.

    Raises:
        UserError: none is left, or the source can't tell the sizes of its images.
    """
    if min_size == 0:
        return source
    sides = source.sides(np.arange(len(source)))
    if sides is None:
        raise UserError(f"data.min_size={min_size}: the images of {said} don't say their sizes; set it to 0")
    kept = np.flatnonzero((sides >= min_size) | (sides == 0))
    small = len(source) - len(kept)
    if not len(kept):
        raise UserError(
            f"data.min_size={min_size} leaves none of the {len(source)} images of {said}, whose largest "
            f"shorter side is {sides.max()} pixels; lower it"
        )
    if not small:
        return source
    subset = Subset(source, kept)
    left_out = f"{small} images below data.min_size={min_size}"
    subset.passed_over = ", ".join(part for part in (source.passed_over, left_out) if part)
    return subset


def open_pair(cfg: Config) -> tuple[ImageSource, ImageSource | None]:
    """What to train on, and what k-NN queries: `data.val`, else a held-out part of labelled images.

    The second is None where there is neither.
    """
    train = open_source(cfg.data, "train")
    if cfg.data.val is not None:
        return train, open_source(cfg.data, "val")
    if cfg.data.train == EMBEDDED:
        from nestling.ssl.data.sources.photo_tiles import PhotoTiles

        return train, PhotoTiles("val", Decoder.of(cfg.data))
    if train.labels is None or cfg.data.holdout == 0:
        return train, None
    return holdout(train, cfg.data.holdout, cfg.seed)


def opened_together(config: Config) -> tuple[ImageSource, ImageSource | None]:
    """`open_pair` on the main process first, then on the others, from what the first one remembered.

    Raises, on all processes:
        UserError: one of them can't open the images or read any, or found others than the main one.
    """
    pair: tuple[ImageSource, ImageSource | None] | None = None
    for turn in (True, False):
        with failing_together(), patiently():  # the main one may list millions of files
            if is_main() == turn:
                pair = open_pair(config)
                for source in pair if turn else ():
                    if source is not None:
                        refuse_if_none_reads(source, config.data)
    assert pair is not None
    found = everyones([[len(source) for source in pair if source is not None]])
    if any(counts != found[0] for counts in found):
        raise UserError(
            f"data.train={printable(config.data.train)}: the processes found different numbers of images "
            f"({', '.join(str(sum(counts)) for counts in found)}); wait until the images are complete, and "
            "see that all machines read the same folder"
        )
    return pair
