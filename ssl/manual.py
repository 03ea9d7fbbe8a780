"""What `--help` and docs/configuration.md say about a schema, generated from its dataclasses.

    python -m nestling.ssl.manual docs/configuration.md

writes the table of keys anew between the two marks of that page.
"""

import inspect
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

from nestling.ssl.keys import MISSING, Key, keys_of, legal, show


def sections(schema: type, prefix: str = "") -> Iterator[tuple[str, str, list[Key]]]:
    """Each section's name, its meaning, and the keys that lie directly in it."""
    keys = keys_of(schema, prefix)
    meaning = (schema.__doc__ or "").strip().split("\n\n")[0]
    yield (
        prefix.rstrip("."),
        meaning,
        [key for key in keys.values() if key.name.count(".") == prefix.count(".")],
    )
    hints = get_type_hints(schema)
    for part in fields(schema):
        if is_dataclass(hints[part.name]):
            yield from sections(hints[part.name], f"{prefix}{part.name}.")


def help_text(
    schema: type,
    program: str,
    about: str,
    positional: Sequence[str],
    configs: Sequence[str],
    options: Sequence[str] = (),
) -> str:
    """The page that `--help` prints: usage, then every key with default, legal values and meaning."""
    width = max(40, min(shutil.get_terminal_size((100, 24)).columns, 100))
    places = "".join(f" {name.upper()}" for name in positional) + "".join(
        f" --{name} NAME" for name in options
    )
    lines = [f"usage: {program}{places} [--config NAME|FILE.yaml] [key=value ...]", ""]
    if about:
        lines += [*_paragraphs(about, width), ""]
    if configs:
        names = ", ".join(configs)
        lines += textwrap.wrap(f"--config  one of {names}, or a YAML file", width, subsequent_indent=" " * 10)
    lines += [
        "--help    this page",
        "",
        "Defaults come first, then the YAML, then key=value; lists are replaced.",
    ]
    for name, meaning, keys in sections(schema):
        if not keys:
            continue
        lines += ["", *textwrap.wrap(f"{name}: {meaning}" if name else meaning, width)]
        lines += [line for key in keys for line in _entry(key, width)]
    return "\n".join(lines)


def _paragraphs(text: str, width: int) -> list[str]:
    """A docstring wrapped anew; its indented lines, which are commands, stay as they are."""
    lines: list[str] = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        kept = paragraph.startswith(" ")
        lines += ["", *(paragraph.splitlines() if kept else textwrap.wrap(paragraph, width))]
    return lines[1:]


def _entry(key: Key, width: int) -> list[str]:
    """`key=default` and the legal values side by side, the meaning below."""
    default = "" if key.default == MISSING else show(key.default)
    left, right = f"  {key.name}={default}", legal(key)
    if len(left) > 39 or len(right) > width - 41:
        head = [left, *textwrap.wrap(right, width - 6, initial_indent=" " * 6, subsequent_indent=" " * 6)]
    else:
        head = [f"{left:<41}{right}"]
    return head + textwrap.wrap(key.meaning, width, initial_indent=" " * 6, subsequent_indent=" " * 6)


def markdown(schema: type) -> str:
    """The same as a page's section: one table for each section of the schema."""
    lines = []
    for name, meaning, keys in sections(schema):
        lines += [f"### {f'`{name}`' if name else 'At the top'}", "", " ".join(meaning.split()), ""]
        lines += ["| key | default | takes | meaning |", "| --- | --- | --- | --- |"]
        for key in keys:
            cells = (f"`{key.name}`", f"`{show(key.default)}`", legal(key), key.meaning.replace("|", "\\|"))
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    from nestling.ssl.config import Config
    from nestling.ssl.pages import renew

    renew(Path(sys.argv[1]), "keys", markdown(Config))
