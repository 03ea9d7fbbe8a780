"""Reading a file of tensors without running what else it holds.

A `.pth` file is a pickle, and unpickling may call anything. Here it is always read with torch's
restricted reader (`weights_only=True`), and the names of foreign classes and functions that the file
mentions (an argparse.Namespace, a DictConfig, a numpy scalar) are bound to inert classes of our own; those
that the file fills as dictionaries or lists (a CfgNode, a deque) become plain ones. So the tensors load,
and nothing of the file's is imported or called.

Refused are files that ask for the operating system, and what torch's reader has no means for: whole
modules pickled before torch 1.6, lists of a foreign class that also carry attributes, other pickle protocols.
"""

import re
import warnings
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import OrderedDict
from pathlib import Path
from pickle import UnpicklingError
from pickletools import genops
from typing import Any, BinaryIO, NamedTuple

import torch

# What torch's reader raises for a damaged or a hostile file, besides UnpicklingError.
_DAMAGES = (RuntimeError, EOFError, OSError, KeyError, IndexError, TypeError, ValueError, AttributeError)
_BLOCKED = ("os", "posix", "nt", "sys", "subprocess", "pty")
_LEGACY_PICKLES = 5  # magic number, protocol, system, the object, the storages' keys


class FileContent(NamedTuple):
    """What a file holds: its object (of safetensors, a dictionary of tensors), and its metadata."""

    content: Any
    metadata: dict[str, str]


class Inert:
    """Stands in for a foreign object: accepts what a pickle does to it, and keeps none of it.

    `origin` is the name that the file gave.
    """

    origin = ""

    def __new__(cls, *arguments: Any, **options: Any) -> "Inert":
        return super().__new__(cls)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Takes anything."""

    def __setstate__(self, state: Any) -> None:
        """Drops it."""

    def __repr__(self) -> str:
        return f"<an object of {self.origin}, not read>"


class InertMapping(Inert):
    """Stands in for a foreign dictionary: a plain one, the only kind that torch's reader fills."""

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        return OrderedDict()


class InertList(Inert):
    """Stands in for a foreign list: a plain one."""

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        return []


def read_file(path: Path) -> FileContent:
    """The content of a `.safetensors` file, or of one that torch.save wrote: told apart by content.

    Raises ValueError for a file that is missing, empty, damaged or something else, naming it.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file of weights")
    with path.open("rb") as file:
        head = file.read(64)
    if not head:
        raise ValueError(f"{path} is empty; copy or download it again")
    if head.startswith(b"version https://git-lfs"):
        raise ValueError(f"{path} is a Git LFS pointer, not the weights; fetch them with `git lfs pull`")
    if head.lstrip().startswith(b"<"):
        raise ValueError(f"{path} is a web page (HTML or XML), not weights; download the file itself")
    if head.startswith(b"PK"):
        return FileContent(_read_zip(path), {})
    if head[8:9] == b"{":
        return _read_safetensors(path)
    if head.startswith(b"\x80"):
        return FileContent(_read_legacy(path), {})
    raise ValueError(
        f"{path} is no file of weights: it is neither safetensors nor written by torch.save "
        f"(it starts with {head[:16]!r})"
    )


def _read_safetensors(path: Path) -> FileContent:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            keys = file.keys()
            return FileContent({key: file.get_tensor(key) for key in keys}, file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is a damaged safetensors file ({error}); copy it again") from error


def _read_zip(path: Path) -> Any:
    """An archive of torch.save, memory-mapped, so that only the tensors that are used are read."""
    try:
        with zipfile.ZipFile(path) as archive:
            inside = {name.rpartition("/")[2] for name in archive.namelist()}
    except (zipfile.BadZipFile, OSError) as error:
        raise ValueError(f"{path} is damaged or cut short ({error}); copy or download it again") from error
    if "constants.pkl" in inside:
        raise ValueError(
            f"{path} is a TorchScript program, which would have to be run to be read; "
            "save its state_dict() with torch.save instead"
        )
    if "data.pkl" not in inside:
        raise ValueError(f"{path} is a zip archive that torch.save did not write, so it holds no weights")
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    except (UnpicklingError, *_DAMAGES) as error:
        raise _unreadable(path, error) from error
    return _load(path, names, mmap=True)


def _read_legacy(path: Path) -> Any:
    """What torch.save wrote before version 1.6: pickles one after the other, then the numbers."""
    try:
        with path.open("rb") as file:
            names = {name for _ in range(_LEGACY_PICKLES) for name in _globals_of_a_pickle(file)}
    except (ValueError, IndexError) as error:  # not all five, or none: a pickle, but not torch.save's
        raise ValueError(
            f"{path} is damaged, or a pickle that torch.save did not write ({error}); "
            "save a state_dict() with torch.save"
        ) from error
    return _load(path, sorted(names), mmap=False)  # torch asks those it knows itself first


def _globals_of_a_pickle(file: BinaryIO) -> set[str]:
    """The names that the next pickle of a file mentions; read, not run, and without Python 2's spellings."""
    pairs = [str(argument).split(" ", 1) for code, argument, _ in genops(file) if code.name == "GLOBAL"]
    return {
        ".".join(NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name)))
        for module, name in pairs
    }


def _load(path: Path, names: list[str], mmap: bool) -> Any:
    blocked = [name for name in names if name.partition(".")[0] in _BLOCKED]
    if blocked:
        raise ValueError(f"{path} asks to call {blocked[0]}: this is no file of weights, and was not read")
    kinds: dict[str, type[Inert]] = {}
    while True:
        stand_ins = {name: _stand_in(name, kinds.get(name, Inert)) for name in names}
        try:
            return _load_once(path, stand_ins, mmap)
        except (UnpicklingError, *_DAMAGES) as error:
            name, kind = _container(str(error), stand_ins)
            if name in kinds or not name:
                raise _unreadable(path, error, names) from error
            kinds[name] = kind  # only the attempt shows what a file fills: once more, with a plain one


def _load_once(path: Path, stand_ins: dict[str, type[Inert]], mmap: bool) -> Any:
    named: list[Any] = [(stand_in, name) for name, stand_in in stand_ins.items()]
    with warnings.catch_warnings(), torch.serialization.safe_globals(named):
        warnings.simplefilter("ignore")  # of torch, about the age of the file's format
        if path.suffix == ".safetensors":  # torch would go by the name, and this isn't one
            with path.open("rb") as file:
                return torch.load(file, map_location="cpu", weights_only=True)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def _stand_in(name: str, kind: type[Inert]) -> type[Inert]:
    """A class that prints as the foreign one."""
    module, _, last = name.rpartition(".")
    return type("Inert", (kind,), {"origin": name, "__module__": module, "__qualname__": last})


def _container(error: str, stand_ins: dict[str, type[Inert]]) -> tuple[str, type[Inert]]:
    """The foreign class that torch's reader did not want to fill, and what it would fill; else empty."""
    match = re.search(r"Can only (SETITEM|append).*but got (<class '.*'>)", error)
    name = next((name for name, stand_in in stand_ins.items() if match and repr(stand_in) == match[2]), "")
    return name, InertMapping if match and match[1] == "SETITEM" else InertList


def _unreadable(path: Path, error: Exception, names: list[str] | None = None) -> ValueError:
    detail = re.search(r"WeightsUnpickler error:\s*(.+)", str(error))  # amid advice on reading it unsafely
    reason = (detail[1] if detail else str(error).partition("\n")[0]).partition(". ")[0]
    if "Only persistent_load of storage" in reason:
        reason = "it holds a whole pickled module in the format before torch 1.6"
    unknown = sorted(name for name in names or () if not name.startswith(("torch.", "collections.")))
    foreign = f"; it holds objects of {', '.join(unknown)}" if unknown else ""
    return ValueError(f"{path} can't be read as weights alone ({reason}{foreign}); save a state_dict()")
