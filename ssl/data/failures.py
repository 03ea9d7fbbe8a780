"""What happens to an image that can't be read: it is told apart, named, and counted."""

from typing import NamedTuple

from nestling.ssl.errors import UserError
from nestling.ssl.names import printable


class UnreadableError(UserError):
    """An image that can't be used: its path and why, in a few words.

    `transient`: it may be read another time, as a disk or a network that fails may recover. What is missing
    or can't be decoded is not.
    """

    def __init__(self, path: str, reason: str, transient: bool = False) -> None:
        super().__init__(path, reason, transient)  # all of it, so that it reaches other processes whole
        self.path, self.reason, self.transient = path, reason, transient

    def __str__(self) -> str:
        return f"{printable(self.path)}: {self.reason}"


class Failure(NamedTuple):
    """One image that couldn't be read, `image` being its index in its source."""

    image: int
    path: str
    reason: str

    def __str__(self) -> str:
        return f"{printable(self.path)}: {self.reason}"
