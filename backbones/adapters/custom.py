"""A user's own `nn.Module` by dotted path: `my.module.ClassName` or `my.module:factory`.

Shapes used below: B images, D features, h x w grid.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from nestling.backbones.adapters import FORMS
from nestling.backbones.adapters.base import Adapter
from nestling.backbones.adapters.construction import build_here, failure
from nestling.backbones.adapters.levels import levels_of
from nestling.backbones.adapters.probing import ContractError, check_backbone, describe
from nestling.backbones.features import Backbone, Features
from nestling.backbones.options import check_drop_path, check_positive

_FIRST_SIDES = (224, 96, 64, 32, 256, 384, 128, 518)  # tried in this order


class Custom(Adapter):
    """`forward(images)` may return `Features`, a map of patches, or one vector per image.

    Of a map, `cls` is the mean patch. A vector counts as an image's only patch. Raises ValueError with
    the shape found where it returns anything else.

    Shape:
        images: (B, in_chans, H, W) -> Features
    """

    has_attention = False

    def __init__(self, name: str, model: nn.Module, in_chans: int) -> None:
        super().__init__(name, model, in_chans)
        self.measure(*((side, side) for side in _FIRST_SIDES))

    def features(self, images: Tensor) -> Features:
        """What the module returns, as `Features`. Shape: images (B, C, H, W) -> Features."""
        found = self.model(images)
        if isinstance(found, Features):
            return found
        if isinstance(found, Tensor) and found.ndim == 4:
            patches = found.flatten(2).mT
            return Features(patches.mean(1), patches, (found.shape[2], found.shape[3]))
        if isinstance(found, Tensor) and found.ndim == 2:
            return Features(found, found[:, None], (1, 1))
        raise ContractError(
            f"{self.name} returns {describe(found)} for images of shape {tuple(images.shape)}; a backbone "
            "returns Features, a map of shape (B, D, h, w) or a vector per image of shape (B, D)"
        )

    def pyramid(self, images: Tensor) -> list[Tensor]:
        """The patches as a map, resized.

        Shape:
            images: (B, C, H, W) -> four of (B, D, ceil(H / s), ceil(W / s)), s = 4, 8, 16, 32
        """
        features = self(images)
        x = features.patches.mT.unflatten(2, features.grid)
        return levels_of([x], [self.stride], *images.shape[-2:])


def build(name: str, options: dict[str, Any]) -> Backbone:
    """Calls the class or factory with the options; a `Backbone` comes back as it is, anything else adapted.

    `in_chans` and `drop_path` go only to what knows them; where it doesn't, they must be 3 and 0.
    Raises ValueError where the name leads nowhere, the options don't fit or the contract is broken.
    """
    in_chans, drop_path = options.get("in_chans", 3), options.get("drop_path", 0.0)
    check_positive(name, in_chans=in_chans)
    check_drop_path(name, drop_path)
    factory = find(name)
    arguments = _arguments(name, factory, options)
    try:
        model = build_here(partial(factory, **arguments))
    except Exception as error:  # a user's constructor may raise anything
        raise ValueError(failure(name, error)) from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name} gives {describe(model)}, not an nn.Module")
    if not isinstance(model, Backbone):
        return Custom(name, model, in_chans)
    model.name = name
    check_backbone(model, in_chans)
    return model


def _arguments(name: str, factory: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    signature = inspect.signature(factory)
    is_open = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    given = dict(options)
    for option, neutral in (("in_chans", 3), ("drop_path", 0)):
        if option in signature.parameters or given.get(option, neutral) == neutral:
            if option not in signature.parameters:
                given.pop(option, None)
        elif not is_open:
            raise ValueError(f"{name} has no option {option!r}, so it must be {neutral}, not {given[option]}")
    if isinstance(factory, type) and issubclass(factory, Backbone) and "name" in signature.parameters:
        given["name"] = name
    try:
        signature.bind(**given)
    except TypeError as error:
        raise ValueError(f"{name}{signature} doesn't fit its options: {error}") from None
    return given


def find(name: str) -> Callable[..., Any]:
    """The class or function behind a dotted path, the last part after a dot or a colon.

    Raises ValueError where there is none.
    """
    module_name, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    if not module_name or not attribute:
        raise ValueError(f"{name!r} is no path to a class; write my.module:ClassName")
    found = _import(name, module_name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{name}: {module_name} has no {attribute}")
        found = getattr(found, part)
    if isinstance(found, nn.Module) or not callable(found):
        raise ValueError(f"{name} is {describe(found)}, not a class or function that builds a network")
    return found


def _import(name: str, module_name: str) -> Any:
    try:
        try:
            return importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if not _is_missing(error, module_name):
                raise
            return _import_from_working_directory(module_name)
    except ModuleNotFoundError as error:
        if not _is_missing(error, module_name):
            raise ValueError(f"{name}: importing {module_name} fails: {error}") from error
        looked = f"neither installed nor in the working directory {os.getcwd()}"
        raise ValueError(f"{name}: no module {error.name} found, {looked}; other forms are {FORMS}") from None
    except Exception as error:  # a user's module may raise anything
        raise ValueError(f"{name}: importing {module_name} fails: {type(error).__name__}: {error}") from error


def _is_missing(error: ModuleNotFoundError, module_name: str) -> bool:
    """Whether it is the module that is missing, not something that it imports."""
    return error.name is not None and f"{module_name}.".startswith(f"{error.name}.")


def _import_from_working_directory(module_name: str) -> Any:
    """As for a user's own script: a recipe has its own folder on the path, not the working directory.

    At the path's end, so that no installed module is hidden; there to stay only where it helped.
    """
    folder = os.getcwd()
    sys.path.append(folder)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except BaseException:
        sys.path.remove(folder)
        raise
