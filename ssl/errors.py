"""What a user did wrong, said in one sentence."""


class UserError(ValueError):
    """Bad input: the message names the file, key or value, what was found and what would work.

    Recipes print it without a traceback and exit with code 2.
    """
