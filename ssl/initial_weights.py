"""`init_from`: a new run that starts from weights someone else trained, or an earlier run did.

Unlike `resume`, which continues a run with its optimizer, schedules and log, this takes the backbone alone:
the head starts fresh, and `backbone.freeze_epochs` keeps its first, random gradients out of good weights.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nestling import backbones
from nestling.backbones.weights import Report, Weights, fit, read
from nestling.ssl.config import Config
from nestling.ssl.distillation import SelfDistillation
from nestling.ssl.errors import UserError
from nestling.ssl.keys import show
from nestling.ssl.run import checkpoints
from nestling.ssl.run.loading import saved_config

logger = logging.getLogger("nestling")

# A file's mask token and detection layers would get no gradient, its table is resized to the views at
# hand, and its stem is adapted to the channels of the images.
OWN_CHOICE = ("mask_token", "pyramid", "position_size", "in_chans", "drop_path")


def settled(config: Config) -> tuple[Config, Weights | None]:
    """The weights that a run starts from, where it does, and the config completed by their network's options.

    A run that is resumed needs no file any more: its own config holds the options.

    Raises:
        UserError: the file can't be read, or holds another backbone than `backbone.name`.
    """
    if config.init_from is None:
        return config, None
    begun = checkpoints.newest(Path(config.out)) if config.resume != "never" else None
    if begun is not None:
        saved = saved_config(begun)
        same = (saved.init_from, saved.backbone.name) == (config.init_from, config.backbone.name)
        return (with_options(config, saved.backbone.options) if same else config), None
    weights = read_initial(config.init_from, config)
    return with_options(config, weights.options), weights


def with_options(config: Config, options: Mapping[str, Any]) -> Config:
    """The config with the options of the weights' own network, where it doesn't set them itself.

    So a layer scale, registers or the interpolation that the weights were trained with need not be spelled.
    """
    kept = {name: value for name, value in options.items() if name not in OWN_CHOICE}
    return replace(config, backbone=replace(config.backbone, options={**kept, **config.backbone.options}))


def read_initial(path: str, config: Config) -> Weights:
    """The weights in a file, as the network that `config` names."""
    name = config.backbone.name
    own = {} if name in backbones.names() else {"name": name}  # code of one's own runs if it is named here
    try:
        weights = read(path, **own)
        if weights.name != name and family(weights.name) == family(name) and weights.layout != "nestling":
            other = read(path, name=name)
            if other.options.keys() <= weights.options.keys() | config.backbone.options.keys():
                weights = other  # a foreign file doesn't say which of two names that fit equally well
    except ValueError as error:
        raise UserError(f"init_from={path}: {str(error).removeprefix(f'{path}: ')}") from None
    if weights.name != name:
        raise UserError(
            f"init_from={path} holds {weights.name}, but backbone.name={name}; "
            f"set backbone.name={weights.name}"
        )
    return weights


def family(name: str) -> str:
    """`vit` of `vit_small_p16`."""
    return name.partition("_")[0]


def start_from(method: SelfDistillation, weights: Weights, config: Config) -> Report:
    """Load the weights into the student's backbone and the teacher's; the log says what was loaded.

    Raises:
        UserError: they don't fit it, but for the keys that `allow_partial` names.
    """
    try:
        report = fit(
            method.student.backbone,
            weights.tensors,
            config.allow_partial,
            layout=weights.layout,
            network=weights.network,
            left_out=weights.left_out,
            notes=weights.notes,
        )
    except ValueError as error:
        own = show(config.backbone.options)
        said = str(error).replace("allow_partial=(...)", "allow_partial='[KEY]'")
        raise UserError(f"init_from={config.init_from} with backbone.options={own}: {said}") from None
    method.teacher.load_state_dict(method.student.state_dict())
    said = "; ".join(str(report).splitlines())
    logger.info(f"init_from={config.init_from}: {said}; the head starts fresh")
    return report
