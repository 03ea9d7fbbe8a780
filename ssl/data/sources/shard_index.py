"""Where the images of tar shards lie: each shard is read through once, then samples are read by offset.

A sample is what webdataset takes for one: consecutive files of one name up to the first dot of the base
name. Its image is the first file that has an image's extension; its label the content of `.cls`, or
`label` or `cls` in `.json`. A hard link is the file that it names in the same shard.
"""

import json
import logging
import os
import re
import tarfile
import time
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from typing import BinaryIO, NamedTuple

import numpy as np

from nestling.ssl.data.sources.cache import Remembered
from nestling.ssl.data.sources.index import RACY_NS, keep, kept, key_of, mark_used
from nestling.ssl.errors import UserError
from nestling.ssl.names import printable

logger = logging.getLogger("nestling")

LAYOUT = 2  # of the arrays in the cache: another number makes every shard be read again
META = re.compile(r"__[^/]*__($|/)")  # names that webdataset keeps for itself
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
LABELS = (".cls", ".json")
BLOCK = tarfile.BLOCKSIZE
REST = 1 << 20  # bytes behind the end mark that are looked at in one go
WITHOUT, MORE = "samples without an image", "further images of samples"
SPARSE, LINKS = "files stored with holes", "links that lead to no earlier file of their shard"
COUNTED = (WITHOUT, MORE, SPARSE, LINKS)


class Member(NamedTuple):
    """A plain file in a shard; its content where it may hold a label."""

    name: str
    offset: int
    size: int
    content: bytes

    @property
    def key(self) -> str:
        folder, slash, base = self.name.rpartition("/")
        return folder + slash + base.partition(".")[0]

    @property
    def extension(self) -> str:
        """Lower case, with its dot; of `left.jpg` the last part."""
        return os.path.splitext(self.name)[1].lower()


class Sample(NamedTuple):
    """An image and the text of its label, None where it has none."""

    image: Member
    label: str | None


def index_of(shards: list[str], key: str, cache: str | None, extensions: frozenset[str]) -> Remembered:
    """Names, offsets and sizes of the images of all shards, from the cache where nothing has changed.

    Arrays: `names` (bytes, end to end) and `name_ends`, `offsets`, `sizes`, `blocks` (where each shard
    ends) and, where every sample has a label, `labels`. Facts: `class_names` and `passed_over`. An index
    holds for as long as the size and time of every shard stay what they were.

    Raises:
        UserError: a shard is missing, cut off, compressed or no tar file.
    """
    name = key_of("\0".join(shards), "shards", str(LAYOUT), *sorted(extensions))
    began = time.time_ns()
    stamps = np.array([_stamp(shard, key) for shard in shards], dtype=np.int64)
    for index in kept(cache, name):
        if index.facts["settled"] and np.array_equal(index.arrays["stamps"], stamps):
            mark_used(index)
            return index
    logger.info(f"{key}: reading through {len(shards)} shards once, to know where each image lies")
    index = _scan(shards, key, extensions)
    index.arrays["stamps"] = stamps
    index.facts["settled"] = bool((stamps[:, 1] < began - RACY_NS).all())
    return keep(index, cache, name)


def _stamp(shard: str, key: str) -> tuple[int, int]:
    """Size and time of the last change, by which a shard is known to be unchanged."""
    try:
        status = os.stat(shard)
    except OSError as error:
        raise UserError(f"{key}: the shard {printable(shard)} can't be read: {error.strerror}") from error
    return status.st_size, status.st_mtime_ns


def _scan(shards: list[str], key: str, extensions: frozenset[str]) -> Remembered:
    names: list[bytes] = []
    places: list[tuple[int, int]] = []
    labels: list[str | None] = []
    blocks: list[int] = []
    counts = dict.fromkeys(COUNTED, 0)
    for shard in shards:
        for sample in _samples(_members(shard, key, counts), extensions, counts):
            names.append(os.fsencode(sample.image.name))
            places.append((sample.image.offset, sample.image.size))
            labels.append(sample.label)
        blocks.append(len(names))
    offsets, sizes = np.array(places, dtype=np.int64).reshape(-1, 2).T
    arrays = {
        "names": np.frombuffer(b"".join(names), dtype=np.uint8),
        "name_ends": np.cumsum([len(name) for name in names], dtype=np.int64),
        "offsets": offsets.copy(),
        "sizes": sizes.copy(),
        "blocks": np.array(blocks, dtype=np.int64),
    }
    said = [f"{counts[what]} {what}" for what in COUNTED if counts[what]]
    known = [label for label in labels if label is not None]
    class_names = None
    if known and len(known) == len(labels):
        arrays["labels"], class_names = numbered(known)
    elif known:
        said.append(f"the labels of {len(known)} samples, as {len(labels) - len(known)} have none")
    return Remembered(arrays, {"class_names": class_names, "passed_over": ", ".join(said)})


def numbered(values: list[str]) -> tuple[np.ndarray, list[str]]:
    """One number per distinct value, (N,) int64, and the values in order: as numbers where all are."""
    names = sorted(set(values), key=os.fsencode)
    if all(re.fullmatch(r"-?\d+", name) for name in names):
        names.sort(key=int)
    number = {name: place for place, name in enumerate(names)}
    return np.array([number[value] for value in values], dtype=np.int64), names


def _members(shard: str, key: str, counts: dict[str, int]) -> Iterator[Member]:
    """The plain files of a shard in their order; those that can't be read by offset are counted.

    Raises:
        UserError: it can't be read to its end mark, or goes on behind it.
    """
    places: dict[str, tuple[int, int]] = {}  # of the files so far, for links to them
    try:
        with open(shard, "rb") as file:
            _refuse_compressed(file.read(BLOCK), shard, key)
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r:", encoding="utf-8", errors="surrogateescape") as tar:
                while (member := tar.next()) is not None:
                    tar.members.clear()  # type: ignore[attr-defined]  # else it keeps them all
                    place = _place(member, places, counts)
                    if place is not None:
                        places[member.name] = place
                        yield _member(member.name, *place, file)
                end = tar.offset
            file.seek(end)
            mark = file.read(BLOCK)
            goes_on = _goes_on(file)
    except (tarfile.TarError, EOFError) as error:
        raise UserError(
            f"{key}: the shard {printable(shard)} is cut off or no tar file ({error}); write it anew"
        ) from error
    except OSError as error:
        raise UserError(f"{key}: the shard {printable(shard)} can't be read: {error.strerror}") from error
    if mark != bytes(BLOCK):  # tarfile takes the end of the file, or a damaged header, for the end of the tar
        raise UserError(
            f"{key}: the shard {printable(shard)} is cut off or damaged at byte {end}; write it anew"
        )
    if goes_on:
        raise UserError(
            f"{key}: the shard {printable(shard)} goes on behind its end mark at byte {end}, as `cat a.tar "
            "b.tar` writes it; name the shards each, or join them by tar --concatenate"
        )


def _place(
    member: tarfile.TarInfo, places: dict[str, tuple[int, int]], counts: dict[str, int]
) -> tuple[int, int] | None:
    """Offset and size of a member's content, None where it has none that can be read by offset."""
    if member.issparse():
        counts[SPARSE] += 1
    elif member.isreg():
        return member.offset_data, member.size
    elif member.islnk() and member.linkname in places:
        return places[member.linkname]
    elif member.islnk() or member.issym():
        counts[LINKS] += 1
    return None


def _goes_on(file: BinaryIO) -> bool:
    """Whether anything but zeros follows."""
    return any(part.count(0) < len(part) for part in iter(partial(file.read, REST), b""))


def _refuse_compressed(start: bytes, shard: str, key: str) -> None:
    packer = next((name for magic, name in COMPRESSED.items() if start.startswith(magic)), None)
    if packer:
        raise UserError(
            f"{key}: the shard {printable(shard)} is compressed by {packer}, which allows no access to one "
            "image alone; unpack it to a plain .tar"
        )


def _member(name: str, offset: int, size: int, file: BinaryIO) -> Member:
    content = b""
    if name.lower().endswith(LABELS):
        file.seek(offset)
        content = file.read(size)
    return Member(name, offset, size, content)


def _samples(
    members: Iterator[Member], extensions: frozenset[str], counts: dict[str, int]
) -> Iterator[Sample]:
    """Group files to samples; those without an image, and further images of one, are counted."""
    named = (member for member in members if _is_of_a_sample(member.name))
    for _, group in groupby(named, key=_key):
        files = list(group)
        images = [file for file in files if file.extension in extensions]
        counts[WITHOUT] += not images
        counts[MORE] += max(len(images) - 1, 0)
        if images:
            yield Sample(images[0], _label(files))


def _key(member: Member) -> str:
    return member.key


def _is_of_a_sample(name: str) -> bool:
    """Not webdataset's own, hidden (as macOS adds to tars), or without an extension."""
    base = name.rpartition("/")[2]
    return "." in base and not base.startswith(".") and META.match(name) is None


def _label(files: list[Member]) -> str | None:
    """The text of `.cls`, else of "label" or "cls" in `.json`, where that is a number or a name."""
    for file in files:
        if file.extension == ".cls":
            return file.content.decode("utf-8", "surrogateescape").strip() or None
    for file in files:
        if file.extension == ".json":
            try:
                record = json.loads(file.content)
            except ValueError:
                continue
            value = record.get("label", record.get("cls")) if isinstance(record, dict) else None
            if isinstance(value, int | str) and not isinstance(value, bool):
                return str(value)
    return None
