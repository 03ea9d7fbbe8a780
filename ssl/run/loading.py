"""From a checkpoint to the backbone inside it."""

import json
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from nestling import backbones
from nestling.backbones import Backbone
from nestling.ssl.command_line import read
from nestling.ssl.config import Config
from nestling.ssl.data.channels import backbone_options
from nestling.ssl.errors import UserError
from nestling.ssl.names import printable
from nestling.ssl.run import checkpoints, manifest

NETWORKS = ("teacher", "student")
READ = (*(f"{network}.safetensors" for network in NETWORKS), "config.yaml", "trainer.json")
PREFIX = "backbone."


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint folder meant by `path`: itself, or of a run directory its best, else its newest.

    Of a run, those whose files are damaged are passed over and named.

    Raises:
        UserError: there is neither, or none is sound.
    """
    path = Path(path)
    if not path.is_dir():
        raise UserError(
            f"{path}: no such folder; give a run directory or a folder such as RUN/checkpoints/step_00001000"
        )
    if any((path / f"{network}.safetensors").is_file() for network in NETWORKS):
        return path
    best = checkpoints.pointed(path, checkpoints.BEST)
    found = best if best is not None and checkpoints.is_sound(best, READ) else checkpoints.newest(path, READ)
    if found is None:
        raise UserError(
            f"{path} holds no checkpoint: neither weights ({NETWORKS[0]}.safetensors) nor checkpoints/step_*"
        )
    return found


def load_backbone(checkpoint: Path, network: str = "teacher") -> tuple[Backbone, Config]:
    """The backbone of the teacher or the student, in evaluation mode, and the config it was trained with.

    Raises:
        UserError: a file is missing or damaged, or the weights do not fit the config exactly.
    """
    if network not in NETWORKS:
        raise UserError(f"network={network}: choose teacher or student")
    config = saved_config(checkpoint)
    backbone = build_backbone(config)
    weights = checkpoint / f"{network}.safetensors"
    if not weights.is_file():
        raise UserError(f"{weights}: no such file; the checkpoint is not complete")
    fault = manifest.problem(checkpoint, (weights.name, "config.yaml"))
    if fault is not None:
        raise UserError(f"{printable(checkpoint)} is damaged: {fault}; use another checkpoint of the run")
    try:
        tensors = load_file(weights)
    except SafetensorError as error:
        raise UserError(f"{weights} cannot be read ({error}); use another checkpoint of the run") from error
    inside = {key.removeprefix(PREFIX): value for key, value in tensors.items() if key.startswith(PREFIX)}
    _refuse_misfit(backbone.state_dict(), inside, weights, config.backbone.name)
    backbone.load_state_dict(inside, strict=True)
    return backbone.eval(), config


def build_backbone(config: Config) -> Backbone:
    """An untrained backbone as the config names it, nothing dropped, in evaluation mode."""
    return backbones.create(config.backbone.name, drop_path=0.0, **backbone_options(config)).eval()


def saved_config(checkpoint: Path) -> Config:
    """The config that a checkpoint was written with."""
    path = checkpoint / "config.yaml"
    if not path.is_file():
        raise UserError(f"{path}: no such file; the checkpoint is not complete")
    return read(Config, [], program="", default=path)


def check_size(backbone: Backbone, size: int, key: str) -> None:
    """Raise UserError where a backbone can't take square images of that side, naming the key."""
    try:
        backbone.check_size(size, size)
    except ValueError as error:
        raise UserError(f"{key}={size}: {error}") from error


def saved_step(checkpoint: Path) -> int | None:
    """The step that a checkpoint was written at, where it says so."""
    path = checkpoint / "trainer.json"
    return int(json.loads(path.read_text(encoding="utf-8"))["step"]) if path.is_file() else None


def _refuse_misfit(wanted: dict[str, Tensor], found: dict[str, Tensor], file: Path, name: str) -> None:
    missing, unexpected = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    misshapen = [key for key in wanted.keys() & found.keys() if wanted[key].shape != found[key].shape]
    problems = [
        f"{len(keys)} keys {what}, such as {keys[0]}"
        for keys, what in (
            (missing, "missing"),
            (unexpected, "unexpected"),
            (sorted(misshapen), "of another shape"),
        )
        if keys
    ]
    if problems:
        raise UserError(f"{file} does not fit backbone.name={name} and its options: {'; '.join(problems)}")
