"""What the layout of the folders rests on, and setup.cfg's agreement with the tree."""

import ast
import configparser
import sys
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import pytest

PARTS = ("ssl", "backbones", "recipes", "launch")
COMPILED = (".c", ".h", ".so", ".pyd")  # setup.py makes the last of the first


@pytest.fixture
def setup_cfg(repository: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(repository / "setup.cfg")
    return parser


def sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def test_setup_cfg_names_every_folder_of_modules(
    repository: Path, setup_cfg: configparser.ConfigParser
) -> None:
    folders = {file.parent.relative_to(repository) for part in PARTS for file in sources(repository / part)}
    packages = {"nestling", *(".".join(("nestling", *folder.parts)) for folder in folders)}
    assert set(setup_cfg["options"]["packages"].split()) == packages


def test_every_folder_of_modules_but_ssl_has_an_init(repository: Path) -> None:
    folders = {file.parent for part in PARTS for file in sources(repository / part)} - {repository / "ssl"}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_setup_cfg_ships_every_data_file(repository: Path, setup_cfg: configparser.ConfigParser) -> None:
    patterns = setup_cfg["options.package_data"]
    files = [
        file.relative_to(repository)
        for part in PARTS
        for file in (repository / part).rglob("*")
        if file.is_file() and file.suffix not in (".py", ".pyc", *COMPILED)
    ]
    shipped = [
        file
        for file in files
        if any(
            fnmatch(str(Path(*file.parts[1:])), p)
            for p in patterns.get(f"nestling.{file.parts[0]}", "").split()
        )
    ]
    assert shipped == files
    assert patterns["nestling"] == "py.typed"


def test_typings_link_to_the_parts(repository: Path) -> None:
    links = {path.name: path.resolve() for path in (repository / "typings" / "nestling").iterdir()}
    expected = {part: repository / part for part in PARTS}
    assert links == {**expected, "__init__.py": repository / "nestling" / "__init__.py"}


def test_no_script_shadows_a_module_of_python(repository: Path) -> None:
    """A script's own folder comes first on sys.path, and pytest puts those of the tests there."""
    scripts = [*(repository / "recipes").glob("*.py"), *sources(repository / "tests")]
    assert [script for script in scripts if script.stem in sys.stdlib_module_names] == []


def test_tests_are_no_packages_and_their_names_are_unique(repository: Path) -> None:
    files = sources(repository / "tests")
    assert [file for file in files if file.name == "__init__.py"] == []
    names = Counter(file.name for file in files if file.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []


def imports_hiding_ssl(file: Path) -> list[int]:
    """Lines that bind the name ssl to nestling's."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom)
        and node.module == "nestling"
        and any((alias.asname or alias.name) == "ssl" for alias in node.names)
    ]


def test_no_module_binds_the_name_ssl_to_ours(repository: Path) -> None:
    files = [file for part in (*PARTS, "nestling", "tests") for file in sources(repository / part)]
    assert {file: lines for file in files if (lines := imports_hiding_ssl(file))} == {}


def test_the_search_for_that_finds_it(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import os\nfrom nestling import backbones, ssl\n")
    assert imports_hiding_ssl(tmp_path / "bad.py") == [2]
