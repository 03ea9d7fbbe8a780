"""Reading a file whole, or saying that it can't be reached: disks and network shares fail for moments."""

import errno
import os
import stat
import time
from collections.abc import Callable
from typing import BinaryIO

from nestling.ssl.data.decoding.raster import UndecodableError
from nestling.ssl.data.failures import UnreadableError

RETRIES = 3
PAUSE = 0.05  # seconds before the first retry; twice as long before each further one
PATIENCE = 3
LARGE = 64 * 2**20  # bytes from which a file's header is looked at first
LASTING = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR}


_lost_in_a_row = 0  # files, in this process


def bytes_of(path: str, look: Callable[[BinaryIO, int], None]) -> bytes:
    """The content of a file, tried again `RETRIES` times where the system can't give it but may yet.

    After `PATIENCE` files in a row in vain there is one try each, until one can be reached: a disk that
    is gone shows in seconds. `look` is called on a large file and its number of bytes first, and may
    refuse it.

    Raises:
        UnreadableError: the file can't be reached.
        UndecodableError: it is no file, or `look` refuses it.
    """
    global _lost_in_a_row
    tries = RETRIES + 1 if _lost_in_a_row < PATIENCE else 1
    for attempt in range(tries):
        try:
            content = _read(path, look)
        except OSError as problem:
            if attempt + 1 == tries or not may_recover(problem):
                _lost_in_a_row += may_recover(problem)
                raise _unreachable(path, problem, tries) from problem
        else:
            _lost_in_a_row = 0
            return content
        time.sleep(PAUSE * 2**attempt)
    raise AssertionError("the last attempt returns or raises")


def _unreachable(path: str, problem: OSError, tries: int) -> UnreadableError:
    if problem.errno == errno.ENOENT:
        return UnreadableError(path, "is not there")
    reason = f"can't be reached: {problem.strerror or problem}"
    if not may_recover(problem):
        return UnreadableError(path, reason)
    return UnreadableError(path, f"{reason}; tried {tries} times" if tries > 1 else reason, transient=True)


def may_recover(problem: OSError) -> bool:
    """Whether another try could succeed: for all that the system reports but a path that leads nowhere."""
    return problem.errno is not None and problem.errno not in LASTING


def open_file(path: str) -> BinaryIO:
    """Open a regular file; anything else is refused, as opening a pipe waits for its other end.

    Raises:
        UndecodableError: it is a folder, a pipe, a socket or a device.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        raise UndecodableError(f"is {_kind(mode)}, not a file")
    return open(path, "rb")


def _read(path: str, look: Callable[[BinaryIO, int], None]) -> bytes:
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > LARGE:
            look(file, size)
            file.seek(0)
        return file.read()


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")
