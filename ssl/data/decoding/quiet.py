"""Image libraries warn of what the decoder settles itself; here alone they are told to be quiet."""

import logging
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import Image

LOGGERS = ("PIL.TiffImagePlugin", "tifffile")
FILTER = ("ignore", None, UserWarning, re.compile(r"PIL\."), 0)  # as the module warnings stores it

_lock = threading.Lock()
_inside = 0
_pillows_limit: int | None = None


@contextmanager
def quiet() -> Iterator[None]:
    """While an image is decoded: `data.max_pixels` in place of Pillow's own limit, and no chatter.

    Pillow's limit and the loggers are as before when the last thread has left. The filter against
    Pillow's warnings about odd files stays: setting filters anew for every image would make Python
    forget which other warnings it has shown, and show them again.
    """
    if not warnings.filters or warnings.filters[0] != FILTER:
        warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _inside, _pillows_limit
    with _lock:
        if _inside == 0:
            _pillows_limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
            for name in LOGGERS:
                logging.getLogger(name).disabled = True
        _inside += 1


def _leave() -> None:
    global _inside
    with _lock:
        _inside -= 1
        if _inside == 0:
            Image.MAX_IMAGE_PIXELS = _pillows_limit
            for name in LOGGERS:
                logging.getLogger(name).disabled = False
