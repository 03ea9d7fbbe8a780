"""The walk through a folder: which images lie below it, in which order, and what is passed over.

Only names decide the order: by the parts of the path, compared as bytes. Paths whose slashes became
zero bytes compare so as a whole, which saves a list of parts for each.
"""

import errno
import os
import stat
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nestling.ssl.data.sources.index import stamp
from nestling.ssl.data.sources.packed import END, Packer
from nestling.ssl.names import printable
from nestling.ssl.run.marks import ENVIRONMENT, is_run

LEFT_OUT = (b"__MACOSX",)  # and every name that begins with a dot
RUN_MARK = os.fsencode(ENVIRONMENT)
MAX_NAMED = 3  # of broken links, runs and the like, however many there are
BROKEN = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # a link that leads nowhere
Image = tuple[bytes, int]  # its name, and the number of the real file it is (inode)


class ScanError(Exception):
    """A folder that can't serve as a source; the message goes on from its name."""


class Stretch(NamedTuple):
    """Images of one folder that follow on one another in the order of all: no subfolder comes between."""

    key: bytes  # its place in the order
    folder: bytes  # relative to the root
    names: bytes  # each ended by a zero byte
    numbers: array
    devices: array
    are_links: bytes


class Walk:
    """All that lies below a root; each real folder once, by its real place where it has one there.

    Folders that we have no permission to open are passed over, as most disks have a lost+found.

    Raises:
        ScanError: the root or a disk can't be read, or the root is the folder of a run.
    """

    def __init__(self, root: str, extensions: frozenset[str], own: Iterable[Path] = ()) -> None:
        self._root = root
        self._extensions = frozenset(os.fsencode(extension) for extension in extensions)
        self._stretches: list[Stretch] = []
        self._links: list[bytes] = []  # to folders, not followed yet
        self._seen: set[tuple[int, int]] = set()
        self._own = {_identity(folder) for folder in own if os.path.exists(folder)}
        self._has_file_links = False
        self.visited, self.stamps = bytearray(), array("Q")
        self.num_hidden = self.num_others = self.num_repeated = 0
        self.example = b""  # of the other files
        self.runs: list[bytes] = []
        self.broken: list[bytes] = []
        self.unreachable: list[bytes] = []  # links whose target may be there
        self.closed: list[bytes] = []  # folders that we have no permission to open
        try:
            self._descend(b"")
            while self._links:  # following some may find further ones
                links, self._links = sorted(self._links, key=_place), []
                for link in links:
                    self._descend(link)
        except OSError as error:
            place = printable(os.fsdecode(error.filename or root))
            raise ScanError(f" can't be read: {error.strerror} ({place})") from error

    def _descend(self, folder: bytes) -> None:
        """Visit a folder and all real folders below it."""
        waiting = [folder]
        while waiting:
            folder = waiting.pop()
            try:
                waiting.extend(reversed(self._visit(folder)))
            except PermissionError:
                if not folder:
                    raise
                self.closed.append(folder)

    def _visit(self, folder: bytes) -> list[bytes]:
        """Note a folder and its images unless it was seen already; returns the subfolders to visit."""
        status = os.stat(within(self._root, folder))
        identity = status.st_dev, status.st_ino
        if folder and identity in self._own:
            return []
        subfolders: list[bytes] = []
        if identity in self._seen:
            self.num_repeated += 1
        else:
            found = self._read(folder, status.st_dev)
            self._seen.add(identity)
            if found is None:
                self.runs.append(folder)
                return []  # and not watched: a run under way writes there
            subfolders = found
        self.visited += folder + END
        self.stamps.extend(stamp(status))
        return subfolders

    def _read(self, folder: bytes, device: int) -> list[bytes] | None:
        """Note a folder's own images; returns its real subfolders, or None if nestling wrote a run there."""
        images: list[Image] = []
        subfolders, others, links, num_hidden = list[bytes](), list[bytes](), list[os.DirEntry[bytes]](), 0
        with os.scandir(within(self._root, folder)) as entries:
            for entry in entries:
                name = entry.name
                if name.startswith(b".") or name in LEFT_OUT:
                    num_hidden += 1
                elif entry.is_symlink():
                    links.append(entry)
                elif entry.is_dir(follow_symlinks=False):
                    subfolders.append(name)
                elif self._is_image(name) and entry.is_file(follow_symlinks=False):
                    images.append((name, entry.inode()))
                else:
                    others.append(name)
        if RUN_MARK in others and is_run(Path(os.fsdecode(within(self._root, folder)))):
            if not folder:
                raise ScanError(" is the folder of a run of nestling; name a folder of images")
            return None
        self.num_hidden += num_hidden
        before = folder + b"/" if folder else b""
        folders, files = self._follow(links, before, others)
        if others:
            self.num_others += len(others)
            self.example = self.example or before + min(others)
        images += [(name, number) for name, (number, _) in files.items()]
        devices = {name: target for name, (_, target) in files.items()}
        self._note(folder, device, images, devices, subfolders + folders)
        return [before + name for name in sorted(subfolders)]

    def _follow(
        self, links: list[os.DirEntry[bytes]], before: bytes, others: list[bytes]
    ) -> tuple[list[bytes], dict[bytes, tuple[int, int]]]:
        """The names of those that lead to folders; and those that lead to images, with number and device."""
        folders, files = list[bytes](), dict[bytes, tuple[int, int]]()
        for entry in sorted(links, key=_name):
            try:
                status = entry.stat()
            except OSError as error:
                leads_nowhere = error.errno in BROKEN
                (self.broken if leads_nowhere else self.unreachable).append(before + entry.name)
                continue
            if stat.S_ISDIR(status.st_mode):
                folders.append(entry.name)
                self._links.append(before + entry.name)
            elif stat.S_ISREG(status.st_mode) and self._is_image(entry.name):
                files[entry.name] = (status.st_ino, status.st_dev)
                self._has_file_links = True
            else:
                others.append(entry.name)
        return folders, files

    def _is_image(self, name: bytes) -> bool:
        return name[name.rfind(b".") :].lower() in self._extensions

    def _note(
        self,
        folder: bytes,
        device: int,
        images: list[Image],
        linked: dict[bytes, int],
        subfolders: list[bytes],
    ) -> None:
        """Cut a folder's images where a subfolder comes between two; `linked` are links, to their devices."""
        images.sort()
        cuts = {bisect_left(images, (name, 0)) for name in subfolders}
        for start, stop in pairwise(sorted({0, len(images)} | cuts)):
            names, numbers = zip(*images[start:stop], strict=True)
            stretch = Stretch(
                key=_place(folder + b"/" + names[0] if folder else names[0]),
                folder=folder,
                names=END.join(names) + END,
                numbers=array("Q", numbers),
                devices=array("Q", [linked.get(name, device) for name in names]),
                are_links=bytes([name in linked for name in names]),
            )
            self._stretches.append(stretch)

    def packed(self) -> Packer:
        """The images in their order, each file that links lead to once; call it once."""
        self._stretches.sort(key=_key)
        dropped = self._dropped() if self._has_file_links else None
        packer, begin = Packer(), 0
        for stretch in self._stretches:
            names, count = stretch.names, len(stretch.numbers)
            if dropped is not None and (here := dropped[begin : begin + count]).any():
                kept = [name + END for name, drop in zip(names.split(END), here, strict=False) if not drop]
                self.num_repeated += count - len(kept)
                names = b"".join(kept)
            if names:  # else the folder would be a class without an image
                packer.extend(stretch.folder or None, names, names.count(END))
            begin += count
        return packer

    def _dropped(self) -> np.ndarray:
        """Which entries are links to a file that stands there itself, or that an earlier link leads to.

        Shape:
            returns: (N,) bool
        """
        numbers = np.concatenate([np.frombuffer(part.numbers, dtype=np.uint64) for part in self._stretches])
        devices = np.concatenate([np.frombuffer(part.devices, dtype=np.uint64) for part in self._stretches])
        links = np.frombuffer(b"".join(part.are_links for part in self._stretches), dtype=bool)
        order = np.lexsort((links, numbers, devices))  # stable: real entries first, then by place
        numbers, devices = numbers[order], devices[order]
        again = (numbers[1:] == numbers[:-1]) & (devices[1:] == devices[:-1])
        dropped = np.zeros(len(links), dtype=bool)
        dropped[order[1:]] = again & links[order[1:]]
        return dropped

    def passed_over(self, such_as: str = " such as") -> str:
        """What was there beside the images, in words."""
        parts = [
            _counted(self.num_hidden, "hidden entry", "hidden entries"),
            _counted(self.num_others, "other file", "other files"),
            _counted(len(self.runs), "folder of a run", "folders of runs", self.runs),
            _counted(len(self.broken), "broken link", "broken links", self.broken),
            _counted(
                len(self.unreachable),
                "link that can't be reached",
                "links that can't be reached",
                self.unreachable,
            ),
            _counted(
                len(self.closed), "folder that can't be opened", "folders that can't be opened", self.closed
            ),
            _counted(self.num_repeated, "link to images already counted", "links to images already counted"),
        ]
        if self.num_others:
            parts[1] += f"{such_as} {printable(os.fsdecode(self.example))}"
        return ", ".join(filter(None, parts))


def within(root: str, folder: bytes) -> bytes:
    return os.path.join(os.fsencode(root), folder) if folder else os.fsencode(root)


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _place(path: bytes) -> bytes:
    return path.replace(b"/", END)


def _name(entry: os.DirEntry[bytes]) -> bytes:
    return entry.name


def _key(stretch: Stretch) -> bytes:
    return stretch.key


def _counted(count: int, one: str, many: str, named: list[bytes] | None = None) -> str:
    """A number of things, the first few by their names; nothing for none."""
    if not count:
        return ""
    text = f"{count} {one if count == 1 else many}"
    if named:
        names = [printable(os.fsdecode(name)) for name in named[:MAX_NAMED]]
        text += f" ({', '.join(names + ['…'] * (count > MAX_NAMED))})"
    return text
