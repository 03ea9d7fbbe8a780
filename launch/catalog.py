"""The recipes there are: known by path, never imported, so that listing them costs nothing."""

import ast
import difflib
import importlib.util
from pathlib import Path


def recipes_folder() -> Path:
    """The folder of recipes, in a checkout and in an installed wheel alike."""
    spec = importlib.util.find_spec("nestling.recipes")
    assert spec is not None, "nestling.recipes is part of every install"
    return Path(next(iter(spec.submodule_search_locations or ())))


def recipe_paths() -> dict[str, Path]:
    """Name to script, sorted by name; what cannot be run as a script is not a recipe."""
    files = sorted(recipes_folder().glob("*.py"))
    return {file.stem: file for file in files if 'if __name__ == "__main__":' in file.read_text("utf-8")}


def summary(path: Path) -> str:
    """First line of a script's docstring, read without running it."""
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return docstring.split("\n", 1)[0]


def find(recipe: str) -> Path:
    """The script that a name stands for; a path to a script of one's own is taken as it is.

    Raises:
        ValueError: there is no such recipe; the message names the closest.
    """
    if recipe.endswith(".py"):
        path = Path(recipe)
        if not path.is_file():
            raise ValueError(f"no recipe at {recipe}: the file does not exist")
        return path.resolve()
    paths = recipe_paths()
    if recipe in paths:
        return paths[recipe]
    close = difflib.get_close_matches(recipe, paths, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(paths) or 'none'}"
    raise ValueError(f"no recipe is called {recipe!r}: {hint}")
