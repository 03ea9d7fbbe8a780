"""Small images under any name, for tests of what finds and reads them."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

AN_HOUR = 3600


def plant(root: str | Path, *names: str) -> str:
    """Write an image of 3 x 2 pixels under each name; its red value is its place in `names`. Returns root."""
    for number, name in enumerate(names):
        path = os.path.join(root, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        Image.new("RGB", (3, 2), (number, 0, 0)).save(path, format="PNG")
    return str(root)


def settle(root: str | Path) -> None:
    """Let all folders and files below have changed an hour ago, so that a scan's result holds."""
    then = time.time() - AN_HOUR
    for path in _everything(root):
        os.utime(path, (then, then), follow_symlinks=False)


def _everything(root: str | Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        yield folder
        for name in folders + files:
            yield os.path.join(folder, name)
