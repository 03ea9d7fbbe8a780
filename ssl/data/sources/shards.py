"""Tar shards in webdataset's format, read by offset: any image at any time, each exactly once."""

import glob
import os
import time
from collections import OrderedDict
from functools import cached_property
from typing import Any

import numpy as np

from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.decoding.raster import Reduction
from nestling.ssl.data.decoding.reach import PAUSE, RETRIES
from nestling.ssl.data.failures import UnreadableError
from nestling.ssl.data.sources.folder import EXTENSIONS
from nestling.ssl.data.sources.indexed import IndexedSource
from nestling.ssl.data.sources.shard_index import index_of
from nestling.ssl.data.sources.sides import recalled, remember
from nestling.ssl.errors import UserError
from nestling.ssl.names import printable

MAX_OPEN = 32  # shards held open per process
SIDES = np.dtype(np.int32)  # 0 where unreadable or not read yet
HEADER = 65536  # bytes that nearly always hold an image's size


class TarShards(IndexedSource):
    """The images of tar shards: one file, a brace pattern as webdataset expands it, or a `*` pattern.

    Shards are indexed once, and the index is kept in the cache. `blocks` says where each shard ends.

    Raises:
        UserError: no such shard, one that is cut off or compressed, or no image in them.
    """

    def __init__(
        self, spec: str, decoder: Decoder, key: str = "data.train", cache: str | None = None
    ) -> None:
        self.name = spec
        self._decoder = decoder
        self._shards = [os.path.abspath(shard) for shard in expanded(spec, key)]
        extensions = EXTENSIONS | {".npy"} if decoder.mode == "unchanged" else EXTENSIONS
        self._index = index_of(self._shards, key, cache, extensions)
        self._files = OpenFiles()
        if len(self) == 0:
            seen = f", but {self.passed_over}" if self.passed_over else ""
            raise UserError(
                f"{key}={printable(spec)}: no images in {len(self._shards)} shards; looked for "
                f"{' '.join(sorted(extensions))}{seen}"
            )

    @cached_property
    def _ends(self) -> np.ndarray:
        return self._index.arrays["blocks"]

    @cached_property
    def blocks(self) -> np.ndarray | None:  # type: ignore[override]
        """Where each shard ends."""
        return self._ends

    def __getstate__(self) -> dict[str, Any]:
        """Without what the index holds: a spawned process maps it again."""
        kept = ("name", "_decoder", "_shards", "_index", "_files")
        return {name: self.__dict__[name] for name in kept}

    def __len__(self) -> int:
        return len(self._index.arrays["offsets"])

    def path(self, index: int) -> str:
        """The shard's path, then the name in it."""
        index = range(len(self))[index]
        ends = self._index.arrays["name_ends"]
        start = ends[index - 1] if index else 0
        name = os.fsdecode(self._index.arrays["names"][start : ends[index]].tobytes())
        return os.path.join(self._shard(index), name.lstrip("/"))

    def load(self, index: int, reduction: Reduction | None = None) -> np.ndarray:
        size = int(self._index.arrays["sizes"][index])
        return self._decoder.content(self._bytes(index, size), self.path(index), reduction)

    def sides(self, indices: np.ndarray) -> np.ndarray:
        """Those read before are kept beside an index that holds for as long as no shard changes."""
        settled = self._index.facts["settled"]
        known = recalled(self._index, self._decoder, SIDES, len(self)) if settled else None
        if known is None:
            known = np.zeros(len(self), dtype=SIDES)
        asked = np.asarray(indices, dtype=np.int64)
        unknown = np.unique(asked[known[asked] == 0])
        known[unknown] = [self._side(index) for index in unknown.tolist()]
        if settled and known[unknown].any():
            remember(self._index, self._decoder, known)
        return known[asked].astype(np.int64)

    def _side(self, index: int) -> int:
        """The start of a file is tried first, as it mostly is enough."""
        whole = int(self._index.arrays["sizes"][index])
        for count in sorted({min(whole, HEADER), whole}):
            try:
                size = self._decoder.content_size(self._bytes(index, count))
            except UnreadableError:  # load says so
                return 0
            if size is not None:
                return min(size)
        return 0

    def _bytes(self, index: int, count: int) -> bytes:
        """The first `count` bytes of an image's file."""
        shard, offset = self._shard(index), int(self._index.arrays["offsets"][index])
        for attempt in range(RETRIES + 1):
            try:
                content = self._files.read(shard, offset, count)
            except OSError as error:
                self._files.close(shard)  # a network share may have given it up
                if attempt == RETRIES:
                    reason = f"can't be reached: {error.strerror}; tried {RETRIES + 1} times"
                    raise UnreadableError(self.path(index), reason, transient=True) from error
                time.sleep(PAUSE * 2**attempt)
            else:
                break
        if len(content) < count:
            raise UnreadableError(
                self.path(index), "its shard was cut off after it was indexed", transient=True
            )
        return content

    def _shard(self, index: int) -> str:
        return self._shards[int(np.searchsorted(self._ends, index, side="right"))]


class OpenFiles:
    """Files held open to read pieces of them, the longest unused closed first; each process has its own."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, int] = OrderedDict()

    def read(self, path: str, offset: int, count: int) -> bytes:
        """Up to `count` bytes; by position alone, as a forked process shares the place in a file.

        Raises:
            OSError: the file can't be opened or read.
        """
        if path not in self._open:
            if len(self._open) >= MAX_OPEN:
                os.close(self._open.popitem(last=False)[1])
            self._open[path] = os.open(path, os.O_RDONLY)
        self._open.move_to_end(path)
        parts: list[bytes] = []
        while count and (part := os.pread(self._open[path], count, offset)):
            parts.append(part)
            offset, count = offset + len(part), count - len(part)
        return b"".join(parts)

    def close(self, path: str) -> None:
        """Open it anew when it is read next."""
        if path in self._open:
            os.close(self._open.pop(path))

    def __reduce__(self) -> tuple[type["OpenFiles"], tuple[()]]:
        return OpenFiles, ()

    def __del__(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)


def expanded(spec: str, key: str) -> list[str]:
    """The shards that a pattern means, each once; braces in the order they say, `*` in that of bytes.

    Raises:
        UserError: there is none, or braces and no webdataset to expand them.
    """
    if os.path.exists(spec):
        return [spec]  # even if its name holds a * or a brace
    if "://" in spec or spec.startswith("pipe:"):
        raise UserError(f"{key}={printable(spec)}: shards are read from files; download them and name those")
    shards: list[str] = []
    for pattern in _braces_expanded(spec, key) if "{" in spec else [spec]:
        found = glob.glob(pattern) if glob.has_magic(pattern) else [pattern]
        shards += sorted(found, key=os.fsencode)
    if not shards:
        raise UserError(f"{key}={printable(spec)}: no file has such a name")
    return list(dict.fromkeys(shards))


def _braces_expanded(spec: str, key: str) -> list[str]:
    try:
        from webdataset.shardlists import expand_urls
    except ImportError as error:
        raise UserError(
            f"{key}={printable(spec)}: braces need the package webdataset, which is not installed: "
            "run `pip install nestling[webdataset]`, or write a pattern with *"
        ) from error
    try:
        return list(expand_urls(spec))
    except ValueError as error:
        raise UserError(f"{key}={printable(spec)}: the braces can't be expanded: {error}") from error
