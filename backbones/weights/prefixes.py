"""From what a file holds to one network's tensors under bare keys.

Checkpoints nest networks in dictionaries, and wrappers (DDP, torch.compile, a training module) put
their names before a key. Only what leads a key is taken off: an inner `module.` or `backbone.` stays.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

NETWORKS = ("teacher", "student")

# Keys of a checkpoint's dictionary. An average of the weights is what a teacher is.
_TEACHERS = (
    "teacher",
    "model_ema",
    "state_dict_ema",
    "ema_state_dict",
    "ema",
    "target_backbone",
    "target_encoder",
)
_STUDENTS = ("student",)
_CONTAINERS = ("model", "state_dict", "model_state_dict", "module", "network", "net", "backbone", "encoder")

_WRAPPERS = ("module", "_orig_mod", "model", "network", "net", "teacher", "student")
_INSIDE = ("backbone", "teacher_backbone", "student_backbone", "target_backbone")
_NAMED = {"teacher_backbone": "teacher", "target_backbone": "teacher", "student_backbone": "student"}


class Network(NamedTuple):
    """One network's tensors under bare keys.

    `network` is teacher or student where the file says so; `heads` are the keys of what lies beside
    the backbone in a larger network.
    """

    tensors: dict[str, Tensor]
    network: str | None
    heads: tuple[str, ...]


class _Key(NamedTuple):
    """A key without its leading wrappers, the network they name, and whether one held a backbone."""

    bare: str
    network: str | None
    inside: bool


def open_container(content: Any, network: str, file: str) -> Network:
    """The tensors of the teacher or the student, out of nested dictionaries and leading prefixes.

    Raises ValueError where the file holds no tensors, or only the other network.
    """
    found: str | None = None
    while isinstance(content, Mapping):
        key = _descend(content, network)
        if key is None:
            break
        found = found or _named(key)
        content = content[key]
    _check_asked(found, network, file)
    tensors = _tensors(content, file)
    inside: tuple[str, ...] = _INSIDE
    if any("encoder.patch_embed." in key for key in tensors):
        inside += ("encoder",)  # of masked image models; elsewhere a layout's own name
    keys = {key: _strip(key, inside) for key in tensors}
    groups = {key.network for key in keys.values() if key.network}
    if groups and network not in groups:
        _check_asked(groups.pop(), network, file)
    if groups:
        keys = {key: short for key, short in keys.items() if short.network == network}
    wrapped = any(short.inside for short in keys.values())
    bare: dict[str, Tensor] = {}
    for key, short in keys.items():
        if wrapped and not short.inside:
            continue
        if short.bare in bare:
            raise ValueError(
                f"{file} holds two tensors named {short.bare} (one as {key}); save one network's state_dict()"
            )
        bare[short.bare] = tensors[key]
    heads = tuple(short.bare for short in keys.values() if wrapped and not short.inside)
    return Network(bare, found or (network if groups else None), heads)


def _descend(content: Mapping[Any, Any], network: str) -> str | None:
    """The key to follow, or None where the tensors lie here."""
    nested = [key for key, value in content.items() if isinstance(value, Mapping) and value]
    asked, other = (_TEACHERS, _STUDENTS) if network == "teacher" else (_STUDENTS, _TEACHERS)
    for key in (*asked, *_CONTAINERS, *other):
        if key in nested:
            return key
    return None


def _named(key: str) -> str | None:
    return "teacher" if key in _TEACHERS else "student" if key in _STUDENTS else None


def _check_asked(found: str | None, network: str, file: str) -> None:
    if found is not None and found != network:
        raise ValueError(f"{file} holds the {found} and no {network}; ask for it with network={found!r}")


def _tensors(content: Any, file: str) -> dict[str, Tensor]:
    if isinstance(content, Mapping):
        tensors = {str(key): value for key, value in content.items() if isinstance(value, Tensor)}
        if tensors:
            return tensors
        listed = ", ".join(str(key) for key in list(content)[:8]) or "nothing"
        raise ValueError(f"{file} holds no tensors where weights lie; its keys are {listed}")
    raise ValueError(
        f"{file} holds {content!r:.120} instead of a dictionary of tensors; save a model's state_dict()"
    )


def _strip(key: str, inside: tuple[str, ...]) -> _Key:
    network, is_inside = None, False
    first, dot, rest = key.partition(".")
    while dot and (first in _WRAPPERS or first in inside):
        network = network or _NAMED.get(first) or (first if first in NETWORKS else None)
        is_inside = is_inside or first in inside
        key = rest
        first, dot, rest = key.partition(".")
    return _Key(key, network, is_inside)
