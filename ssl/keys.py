"""The keys of a schema: found in its dataclasses, converted from YAML, held against their legal values.

Text is converted by the key's type, not by YAML's guess: `no` stays text where a key takes text, and
`1e-3` is a number where it takes a number.
"""

import dataclasses
import difflib
import math
import re
import types
from collections.abc import Iterable, Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

NULL = frozenset({"", "~", "null", "Null", "NULL"})
BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
INTEGER = re.compile(r"[-+]?\d+(_\d+)*")
FLOAT = re.compile(r"[-+]?((\d[\d_]*(\.\d*)?|\.\d+)(e[-+]?\d+)?|\.?(inf|nan))", re.IGNORECASE)
MISSING = "???"  # omegaconf's mark of a value that must still be given


@dataclasses.dataclass(frozen=True)
class Key:
    """One setting: its dotted name, what it may hold, and what it means."""

    name: str
    kind: Any  # of the value, or of each element: str, int, float, bool or Any
    container: type | None  # list, dict or None
    optional: bool
    default: Any
    meaning: str = ""
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    ordered: bool = False
    length: int | None = None
    words: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def element(self, name: str) -> "Key":
        """The key of one entry of a list or dict."""
        return dataclasses.replace(self, name=name, container=None, optional=self.kind is Any, default=None)


def keys_of(schema: type, prefix: str = "") -> dict[str, Key]:
    """Every leaf of a schema by its dotted name, in the schema's order."""
    found: dict[str, Key] = {}
    hints = get_type_hints(schema)
    for part in dataclasses.fields(schema):
        hint, name = hints[part.name], prefix + part.name
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            found |= keys_of(hint, name + ".")
            continue
        alternatives = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        optional = type(None) in alternatives
        (hint,) = (alternative for alternative in alternatives if alternative is not type(None))
        container = get_origin(hint)
        kind = get_args(hint)[-1] if container else hint
        assert container in (None, list, dict), f"{name}: {hint} has no conversion"
        assert kind in (str, int, float, bool, Any), f"{name}: {hint} has no conversion"
        default = part.default_factory() if callable(part.default_factory) else part.default
        found[name] = Key(name, kind, container, optional, default, **part.metadata)
    return found


def sections_of(keys: Mapping[str, Key]) -> list[str]:
    """The names that hold keys: `optim` for `optim.lr`."""
    parts = [name.split(".") for name in keys]
    return list(dict.fromkeys(".".join(part[:end]) for part in parts for end in range(1, len(part))))


def nearest(name: str, known: Iterable[str], count: int = 1) -> list[str]:
    """The known names most like this one, best first; `lr` is nearest to `optim.lr`."""

    def likeness(candidate: str) -> float:
        whole = difflib.SequenceMatcher(None, name, candidate).ratio()
        leaf = difflib.SequenceMatcher(None, name.split(".")[-1], candidate.split(".")[-1]).ratio()
        return max(whole, (whole + 2 * leaf) / 3)

    return sorted(known, key=likeness, reverse=True)[:count]


def convert(key: Key, node: yaml.Node | None) -> Any:
    """The value that a YAML node means for a key.

    What the key can't hold is returned as it is written, for `fault` to refuse.
    """
    if node is None:
        return None
    if key.container is list and not isinstance(node, yaml.MappingNode):
        if isinstance(node, yaml.ScalarNode):
            value = _scalar(key, node)
            return value if value in (None, MISSING) else [value]
        return [convert(key.element(key.name), item) for item in node.value]
    if key.container is dict and isinstance(node, yaml.MappingNode):
        return {
            name.value: convert(key.element(f"{key.name}.{name.value}"), item) for name, item in node.value
        }
    if isinstance(node, yaml.ScalarNode):
        return _scalar(key, node)
    if key.kind is Any and isinstance(node, yaml.SequenceNode) and key.container is None:
        return [convert(key, item) if isinstance(item, yaml.ScalarNode) else item for item in node.value]
    return node


def _scalar(key: Key, node: yaml.ScalarNode) -> Any:
    text, quoted = node.value, node.style is not None
    if text in NULL and not quoted:
        return None
    if key.kind is str or text == MISSING or (key.kind is Any and quoted):
        return text
    if key.kind in (bool, Any) and text.lower() in BOOLEANS:
        return BOOLEANS[text.lower()]
    if key.kind in (int, Any) and INTEGER.fullmatch(text):
        return int(text)
    if key.kind in (float, Any) and FLOAT.fullmatch(text):
        return float(text.lower().replace("_", "").replace(".inf", "inf").replace(".nan", "nan"))
    return text


def meant(key: Key, value: Any) -> Any:
    """What a config holds for a value: the number that a word of the key stands for, else the value."""
    return key.words.get(value, value) if isinstance(value, str) else value


def worded(key: Key, value: Any) -> Any:
    """The opposite of `meant`: a value as it is written."""
    if type(value) is not int:
        return value
    return next((word for word, number in key.words.items() if number == value), value)


def fault(key: Key, value: Any) -> str | None:
    """Why a key can't hold a value: a hint, often empty; None where it can."""
    if value is None:
        return None if key.optional else ""
    if key.container is dict:
        return None if isinstance(value, dict) else f"one is {key.name}={show(key.default or {'name': 1})}"
    if key.container is list:
        return _list_fault(key, value)
    if key.kind is Any:
        legal = isinstance(value, (str, int, float, bool)) or (
            isinstance(value, list) and all(isinstance(item, (str, int, float, bool)) for item in value)
        )
        return None if legal else ""
    return _scalar_fault(key, value)


def _list_fault(key: Key, value: Any) -> str | None:
    if not isinstance(value, list) or (not value and key.default != []):
        return ""
    for item in value:
        hint = fault(key.element(key.name), item)
        if hint is not None:
            commas = isinstance(item, str) and "," in item
            return f"a list is written {key.name}=[{item}]" if commas else hint
    if key.length is not None and len(value) != key.length:
        return ""
    return "" if key.ordered and value != sorted(value) else None


def _scalar_fault(key: Key, value: Any) -> str | None:
    if key.kind is str:
        if not isinstance(value, str):
            return ""
        if not value:
            return "it must not be empty"
        if not key.choices or value in key.choices or "${" in value:
            return None
        return f"did you mean {nearest(value, key.choices)[0]}?" if value.lower() not in BOOLEANS else ""
    if isinstance(value, str) and value in key.words:
        return None
    if isinstance(value, bool) or key.kind is bool:
        return None if isinstance(value, bool) and key.kind is bool else ""
    if isinstance(value, str) and value.lower() in key.words:
        return f"write {value.lower()}"
    if key.kind is int and isinstance(value, str) and FLOAT.fullmatch(value):
        return _whole_number_hint(value)
    if not isinstance(value, (int, float) if key.kind is float else int):
        return ""
    if not math.isfinite(value):
        return "it must be finite"
    below, above = key.low is not None and value < key.low, key.high is not None and value > key.high
    return "" if below or above else None


def _whole_number_hint(text: str) -> str:
    try:
        number = float(text)
    except ValueError:
        return ""
    return f"write {int(number)}" if number.is_integer() else ""


def legal(key: Key) -> str:
    """The legal values in words, as in "a number from 0 to 1, or null"."""
    nouns = {str: ("text", "names"), int: ("a whole number", "whole numbers"), float: ("a number", "numbers")}
    one, many = nouns.get(
        key.kind, ("true or false", "values") if key.kind is bool else ("a value", "values")
    )
    if key.choices:
        one, many = f"one of {', '.join(key.choices)}", f"names out of {', '.join(key.choices)}"
    span = _span(key)
    if key.container is None:
        words = one + span
    elif key.container is dict:
        words = f"a mapping of names to {many}{span}"
    else:
        words = f"a list of {f'{key.length} ' if key.length else ''}{many}{span}"
        if key.ordered:
            words += ", the first not above the second"
    words += "".join(f", or {word}" for word in key.words)
    return words + (", or null" if key.optional and key.kind is not Any else "")


def _span(key: Key) -> str:
    if key.low is not None and key.high is not None:
        return f" from {show(key.low)} to {show(key.high)}"
    if key.low is not None:
        return f" of at least {show(key.low)}"
    return f" of at most {show(key.high)}" if key.high is not None else ""


def show(value: Any) -> str:
    """A value as it is written on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return f"[{', '.join(map(show, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {show(item)}' for name, item in value.items())}}}"
    return str(value)
