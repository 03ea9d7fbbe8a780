"""Recipes run in the process of a test: a start of their own takes six seconds, with a launcher fourteen."""

from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from io import StringIO

from config_observers import left_as_found


def said_here(recipe: str, arguments: Sequence[str]) -> str:
    """What a recipe prints, errors included; what it raises comes through."""
    with left_as_found(), redirect_stdout(StringIO()) as said, redirect_stderr(said):
        import_module(f"nestling.recipes.{recipe}").main(list(arguments))
    return said.getvalue()
