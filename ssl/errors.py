"""How a run ends early: by a user's mistake, or because it was asked to."""


class UserError(ValueError):
    """Bad input: the message names the file, key or value, what was found and what would work.

    Recipes print it without a traceback and exit with code 2.
    """


class Stopped(Exception):  # noqa: N818  # it is no error
    """A run that was asked to stop, and did so after a step that it saved; the message says how to go on.

    Recipes exit with `code`: 128 + the number of the signal, or 75 where `train.max_hours` were over.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code
