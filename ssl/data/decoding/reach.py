"""Reading a file whole, or saying that it can't be reached: disks and network shares fail for moments."""

import os
import stat
import time
from collections.abc import Callable
from typing import BinaryIO

from nestling.ssl.data.decoding.raster import UndecodableError
from nestling.ssl.data.failures import UnreadableError

RETRIES = 3
PAUSE = 0.05  # seconds before the first retry; twice as long before each further one
LARGE = 64 * 2**20  # bytes from which a file's header is looked at first


def bytes_of(path: str, look: Callable[[BinaryIO], None]) -> bytes:
    """The content of a file, tried again `RETRIES` times where the system can't give it.

    `look` is called on a large file first, and may refuse it.

    Raises:
        UnreadableError: the file can't be reached.
        UndecodableError: it is no file, or `look` refuses it.
    """
    for attempt in range(RETRIES + 1):
        try:
            return _read(path, look)
        except OSError as problem:
            if attempt == RETRIES:
                why = problem.strerror or str(problem)
                reason = f"can't be reached: {why}; tried {RETRIES + 1} times"
                raise UnreadableError(path, reason, io=True) from problem
        time.sleep(PAUSE * 2**attempt)
    raise AssertionError("the last attempt returns or raises")


def open_file(path: str) -> BinaryIO:
    """Open a regular file; anything else is refused, as opening a pipe waits for its other end.

    Raises:
        UndecodableError: it is a folder, a pipe or a device.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        raise UndecodableError(f"is {_kind(mode)}, not a file")
    return open(path, "rb")


def _read(path: str, look: Callable[[BinaryIO], None]) -> bytes:
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > LARGE:
            look(file)
            file.seek(0)
        return file.read()


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a folder"
    return "a pipe" if stat.S_ISFIFO(mode) else "a device"
