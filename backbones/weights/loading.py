"""`load`: from a path to a backbone with the weights inside, and a report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from nestling.backbones.features import Backbone
from nestling.backbones.registry import create
from nestling.backbones.weights import own
from nestling.backbones.weights.files import read_file
from nestling.backbones.weights.fitting import fit
from nestling.backbones.weights.folders import find_weights
from nestling.backbones.weights.identify import (
    assumptions,
    beyond_defaults,
    family_of,
    identify,
    nearest_name,
)
from nestling.backbones.weights.prefixes import NETWORKS, Network, open_container
from nestling.backbones.weights.recognise import convert
from nestling.backbones.weights.report import Report


@dataclass(frozen=True)
class Weights:
    """A file's tensors under our keys, and the network that they are.

    `create(name, **options)` builds it. `network` is teacher or student where the file says which;
    `left_out` are the file's keys that are no part of the backbone.
    """

    tensors: dict[str, Tensor]
    name: str
    options: dict[str, Any]
    layout: str
    network: str | None
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class Loaded(NamedTuple):
    """A backbone with its weights, in evaluation mode, and what was loaded."""

    backbone: Backbone
    report: Report


def load(
    path: str | Path,
    name: str | None = None,
    *,
    network: str = "teacher",
    allow_partial: Sequence[str] = (),
    **options: Any,
) -> Loaded:
    """The backbone in a file or folder: `backbone, report = load("dino_deitsmall16_pretrain.pth")`.

    Takes `.pth` and safetensors in the layouts of DINO, iBOT, DINOv2, XCiT, Swin, EsViT, timm, torchvision
    and Hugging Face, our run directories, checkpoints and exports. The registered name and the options
    are read from the tensors; `name` and `options` override them and must fit. Of a file with both,
    `network` says which. The settings that a layout was trained with (interpolation, padding) are set.

    Nothing in the file is run. Layer norms keep their family's epsilon (1e-6, Swin 1e-5): the report says
    where a file's config names another one.

    Raises ValueError for a file that can't be read, is in no known layout, or does not match the
    backbone in every tensor; `allow_partial` names patterns of keys that may differ.
    """
    return built(read(path, network, name, **options), path, allow_partial)


def built(weights: Weights, path: str | Path, allow_partial: Sequence[str] = ()) -> Loaded:
    """The backbone that `weights`, read from `path`, describe, with them inside.

    Raises ValueError where they don't match it, but for the keys that `allow_partial` names.
    """
    backbone = create(weights.name, **weights.options).eval()
    try:
        report = fit(
            backbone,
            weights.tensors,
            allow_partial,
            adapt=False,
            layout=weights.layout,
            network=weights.network,
            left_out=weights.left_out,
            notes=weights.notes,
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return Loaded(backbone, report)


def read(path: str | Path, network: str = "teacher", name: str | None = None, **options: Any) -> Weights:
    """The tensors under our keys, with the name and options of the network that they fit.

    Raises ValueError as `load` does, but for tensors that don't fit `name` and `options`.
    """
    if network not in NETWORKS:
        raise ValueError(f"network={network!r}: choose teacher or student")
    file = find_weights(Path(path).expanduser(), network)
    content, metadata = read_file(file)
    description = own.describe(metadata, str(file))
    if description is None:
        return _foreign(file, open_container(content, network, str(file)), name, options)
    own.check_name(description.name, name, str(file))
    tensors, heads = own.split_heads(content, description)
    options = {**description.options, **options}
    return Weights(tensors, description.name, options, "nestling", _label(file), heads)


def _foreign(file: Path, found: Network, name: str | None, options: Mapping[str, Any]) -> Weights:
    """A file that doesn't say what it holds."""
    converted = convert(found.tensors, found.heads, file)
    trained = converted.options
    if "pos_embed" not in converted.tensors:  # how to resize a table is refused where there is none
        trained = {key: value for key, value in trained.items() if not key.startswith("interpolate_")}
    known = {**trained, **options}
    try:
        settled = identify(converted.family, converted.tensors, known)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    notes = [*converted.notes, *assumptions(converted.family, settled, known)]
    if name is None:
        name, rest = nearest_name(converted.family, settled)
    elif family_of(name) == converted.family:
        rest = beyond_defaults(name, settled)
    else:
        raise ValueError(f"{file} holds a {converted.family} ({converted.layout}), which {name} is not")
    return Weights(
        converted.tensors,
        name,
        {**rest, **options},
        converted.layout,
        found.network or _label(file),
        (*converted.left_out, *found.heads),
        tuple(notes),
    )


def _label(file: Path) -> str | None:
    return file.stem if file.stem in NETWORKS else None
