"""Building what others wrote: on the meta device as well, and with errors that name the option."""

import re
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

Network = TypeVar("Network", bound=nn.Module)


def build_here(build: Callable[[], Network]) -> Network:
    """`build()` on the default device; where that is meta, also for networks that compute while built.

    Those are built on the CPU and stripped of their numbers, with the random state as it was.
    """
    if torch.get_default_device().type != "meta":
        return build()
    try:
        return build()
    except (NotImplementedError, RuntimeError):  # no numbers on meta; any other fault comes again below
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            return build().to("meta")


def refused_option(error: Exception) -> str:
    """The option that a constructor doesn't know; empty where that is not what it raised."""
    match = re.search(r"unexpected keyword argument[^']*'(\w+)'", str(error))  # one, or a list
    return match[1] if match and isinstance(error, TypeError) else ""


def failure(name: str, error: Exception) -> str:
    """What a user reads when a constructor raised."""
    option = refused_option(error)
    if option:
        return f"{name} has no option {option!r}"
    return f"{name} can't be built: {type(error).__name__}: {error}"


def refuse_options(name: str, given: dict[str, object], refused: dict[str, str]) -> None:
    """Raises ValueError for the first given option that has a reason not to be set."""
    for option, reason in refused.items():
        if option in given:
            raise ValueError(f"{option} of {name} can't be set: {reason}")
