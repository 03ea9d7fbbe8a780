"""Backbones by name."""

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar, get_type_hints

from nestling.backbones.adapters import FORMS, adapt, is_adapted
from nestling.backbones.features import Backbone

Family = TypeVar("Family", bound=type[Backbone])

_REGISTRY: dict[str, tuple[type[Backbone], dict[str, Any]]] = {}


def register(variants: Mapping[str, Mapping[str, Any]]) -> Callable[[Family], Family]:
    """Class decorator of a family: its names, and the options that make each of them.

    The options that a user may set are the parameters of the class's `__init__`, by their annotated
    types (int, float, bool, str); its first one is `name`.
    """

    def decorate(family: Family) -> Family:
        taken = _REGISTRY.keys() & variants.keys()
        assert not taken, f"registered twice: {sorted(taken)}"
        _REGISTRY.update({name: (family, dict(defaults)) for name, defaults in variants.items()})
        return family

    return decorate


def names() -> list[str]:
    """All registered names, sorted."""
    return sorted(_REGISTRY)


def create(name: str, **options: Any) -> Backbone:
    """Build a backbone: `create("xcit_small_12_p16", in_chans=3, drop_path=0.05)`.

    `timm:NAME`, `torchvision:NAME` and a dotted path to an `nn.Module` are built by their adapters,
    which hand the options on. Raises ValueError for an unknown name or option, naming the closest known,
    and for a value that the option can't take.
    """
    if name not in _REGISTRY and is_adapted(str(name)):
        return adapt(name, options)
    check_name(name)
    family, defaults = _REGISTRY[name]
    hints = _option_types(family)
    for option, value in options.items():
        if option not in hints:
            raise ValueError(f"{name} has no option {option!r}; {_closest(option, sorted(hints))}")
        if not _fits(value, hints[option]):
            wanted = hints[option].__name__
            raise ValueError(f"option {option} of {name} takes a value of type {wanted}, not {value!r}")
    return family(**{"name": name, **defaults, **options})


def check_name(name: str) -> None:
    """Raises ValueError for a name that is neither registered nor in an adapter's form."""
    if name not in _REGISTRY and not is_adapted(str(name)):
        raise ValueError(
            f"unknown backbone {name!r}; {_closest(str(name), names())}; other forms are {FORMS}"
        )


def _option_types(family: type[Backbone]) -> dict[str, type]:
    hints = get_type_hints(family.__init__)
    parameters = list(inspect.signature(family).parameters)
    return {option: hints[option] for option in parameters if option != "name"}


def _fits(value: Any, wanted: type) -> bool:
    if wanted is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))


def _closest(wrong: str, known: list[str]) -> str:
    close = get_close_matches(wrong, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(known)}"
