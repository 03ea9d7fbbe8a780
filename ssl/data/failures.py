"""What happens to an image that can't be read: it is told apart, named, and counted."""

from typing import NamedTuple

from nestling.ssl.errors import UserError
from nestling.ssl.names import printable


class UnreadableError(UserError):
    """An image that can't be used: its path and why, in a few words.

    `io` tells a file that can't be reached (a disk, a permission) from one that can't be decoded.
    """

    def __init__(self, path: str, reason: str, io: bool = False) -> None:
        super().__init__(path, reason, io)  # all of it, so that it reaches other processes whole
        self.path, self.reason, self.io = path, reason, io

    def __str__(self) -> str:
        return f"{printable(self.path)}: {self.reason}"


class Failure(NamedTuple):
    """One image that couldn't be read, `image` being its index in its source."""

    image: int
    path: str
    reason: str
