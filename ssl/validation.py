"""Settings that are legal one by one but not together, refused before any work.

torch is imported inside the functions: a typo in a key must answer without it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nestling.ssl.config import AUTO, Config
from nestling.ssl.data.channels import BY_MODE, backbone_options, channels
from nestling.ssl.errors import UserError
from nestling.ssl.keys import nearest, show
from nestling.ssl.names import printable

if TYPE_CHECKING:
    from nestling.backbones import Backbone


def validate(config: Config) -> None:
    """Hold the settings of a config against each other, the terms and the backbone.

    Raises:
        UserError: one sentence that names the settings and their values.
    """
    _check_epochs(config)
    _check_start(config)
    _check_views(config)
    _check_channels(config)
    _check_terms(config)
    _check_backbone(config)
    if config.overwrite and config.resume != "never":
        raise UserError(
            f"overwrite=true deletes the run that resume={config.resume} would continue; set one of them"
        )


def _check_start(config: Config) -> None:
    """`overwrite` must not delete what the run is to start from."""
    source, out = config.init_from, Path(config.out).resolve()
    try:
        config.out.encode()
    except UnicodeEncodeError:
        raise UserError(
            f"out={printable(config.out)} is no UTF-8, without which safetensors opens no file; choose "
            "another name"
        ) from None
    if config.allow_partial and source is None:
        raise UserError(f"allow_partial={show(config.allow_partial)} does nothing without init_from")
    if (
        source is not None
        and config.overwrite
        and out in (*Path(source).resolve().parents, Path(source).resolve())
    ):
        raise UserError(f"overwrite=true would delete init_from={source}, which lies in out={config.out}")
    if config.train.batch_size == AUTO and config.train.sharding != "none":
        raise UserError(
            f"train.batch_size=auto tries whole networks, which train.sharding={config.train.sharding} is to "
            "spare: give a number"
        )


def _check_epochs(config: Config) -> None:
    for name, length in (
        ("optim.warmup_epochs", config.optim.warmup_epochs),
        ("teacher.temperature_warmup_epochs", config.teacher.temperature_warmup_epochs),
        ("head.freeze_epochs", config.head.freeze_epochs),
        ("backbone.freeze_epochs", config.backbone.freeze_epochs),
    ):
        if length is not None and length > config.train.epochs:
            raise UserError(
                f"{name}={show(length)} is longer than the run: train.epochs={config.train.epochs}"
            )


def _check_views(config: Config) -> None:
    views = config.views
    if views.num_local and views.local_scale[1] > views.global_scale[1]:
        raise UserError(
            f"views.local_scale={show(views.local_scale)} reaches above "
            f"views.global_scale={show(views.global_scale)}; a local crop can't be the larger one"
        )


def _check_channels(config: Config) -> None:
    """One number of channels for the images, their normalisation and the backbone."""
    data, options = config.data, config.backbone.options
    if "in_chans" in options:
        said = f"backbone.options.in_chans={show(options['in_chans'])}"
        raise UserError(f"{said}: images and backbone share one number; write data.in_chans instead")
    fixed = BY_MODE.get(data.mode)
    if fixed is None and data.in_chans is None:
        raise UserError(
            f"data.mode={data.mode} needs data.in_chans, the channels of your images, as in data.in_chans=8"
        )
    if fixed is not None and data.in_chans not in (None, fixed):
        raise UserError(
            f"data.in_chans={data.in_chans} doesn't go with data.mode={data.mode}, which makes {fixed}: "
            "leave it out, or set data.mode=unchanged (gray for 1)"
        )
    count = channels(data)
    for name, values in (("data.mean", data.mean), ("data.std", data.std)):
        if values is None and count not in (1, 3):
            raise UserError(
                f"{name} is needed for {count} channels, one number each; recipes/measure_data.py finds them"
            )
        if values is not None and len(values) != count:
            raise UserError(
                f"{name}={show(values)} has {len(values)} numbers, but images have {count} channels "
                f"(data.mode={data.mode}); give {count}"
            )
    if data.window is not None and data.window[0] == data.window[1]:
        raise UserError(
            f"data.window={show(data.window)} is empty: give two different values, as in [0, 4095]"
        )


def _check_terms(config: Config) -> None:
    from nestling.ssl.terms import NAMES

    for name, weight in config.terms.items():
        if name not in NAMES:
            raise UserError(
                f"unknown term terms.{name}={show(weight)}; did you mean terms.{nearest(name, NAMES)[0]}?"
            )
    if not any(config.terms.values()):
        raise UserError(
            f"terms={show(config.terms)} trains nothing; give one of {', '.join(NAMES)} a weight above 0"
        )


def _check_backbone(config: Config) -> None:
    import torch

    from nestling import backbones

    name, options = config.backbone.name, config.backbone.options
    for wrong in ("name", "drop_path"):
        if wrong in options:
            said = f"backbone.options.{wrong}={show(options[wrong])}"
            raise UserError(f"{said} has a key of its own; write backbone.{wrong}={show(options[wrong])}")
    try:
        with torch.device("meta"):  # shapes only: no memory, no random numbers drawn
            backbone = backbones.create(name, drop_path=config.backbone.drop_path, **backbone_options(config))
    except ValueError as error:
        given = f" with backbone.options={show(options)}" if options else ""
        given += f" and data.in_chans={channels(config.data)}" if "in_chans" in str(error) else ""
        hint = "; set backbone.drop_path=0" if "drop_path" in str(error) and config.backbone.drop_path else ""
        raise UserError(f"backbone.name={name}{given}: {error}{hint}") from None
    try:
        backbone.activation_checkpointing = config.train.activation_checkpointing
    except ValueError as error:
        raise UserError(f"train.activation_checkpointing=true: {error}") from None
    if config.train.compile != "none":
        _check_compiled(config, backbone)
    if not any(parameter.requires_grad for parameter in backbone.parameters()):
        raise UserError(f"backbone.name={name} has no parameter to train; name another backbone")
    for key, side in _sides(config):
        try:
            backbone.check_size(side, side)
        except ValueError as error:
            raise UserError(f"{key}={side} doesn't fit backbone.name={name}: {error}") from None


def _check_compiled(config: Config, backbone: "Backbone") -> None:
    """Blocks of another library are checkpointed from inside, where torch.compile refuses it."""
    from nestling.backbones.adapters.base import Adapter
    from nestling.backbones.adapters.blocks import blocks_of

    asked, name = f"train.compile={config.train.compile}", f"backbone.name={printable(config.backbone.name)}"
    if not blocks_of(backbone):
        raise UserError(f"{asked}: {name} repeats no block that could be compiled; set train.compile=none")
    if config.train.activation_checkpointing and isinstance(backbone, Adapter):
        raise UserError(
            f"{asked} doesn't go with train.activation_checkpointing=true for {name}; switch one of them off"
        )


def _sides(config: Config) -> Iterator[tuple[str, int]]:
    """Every size that the backbone will see, and the key that asks for it."""
    views = config.views
    yield from (("views.global_size", side) for side in views.global_size)
    yield from (("views.local_size", side) for side in views.local_size if views.num_local)
    if config.knn.size is not None:
        yield "knn.size", config.knn.size
