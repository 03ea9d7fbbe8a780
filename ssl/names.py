"""How names that the file system allows are shown: any bytes, always on one line.

Python holds the bytes of a name that are no UTF-8 as surrogates, which no console can print.
"""

import os


def printable(path: str | os.PathLike[str]) -> str:
    r"""A path as text for a message: what is no UTF-8 or no printable character as \xff or \n."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
