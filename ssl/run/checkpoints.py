"""Checkpoints: a folder per saved step, complete or absent.

    checkpoints/step_00001200/
        student.safetensors  teacher.safetensors  terms.safetensors
        optimizer.pt                    loads with torch.load(weights_only=True)
        trainer.json  config.yaml       plain types and text

A folder is written under a hidden name, flushed to disk and renamed; only then do the pointers
`last` and `best` move and old folders go, so a kill at any instant leaves a complete newest one.
"""

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from nestling.ssl.config import Config
from nestling.ssl.data.channels import backbone_options
from nestling.ssl.errors import UserError

TENSORS = ("student", "teacher", "terms")
LAST, BEST = "last", "best"
DAMAGES = (SafetensorError, UnpicklingError, RuntimeError, ValueError, EOFError)


@dataclass
class Checkpoint:
    """Everything a run needs to go on from a step boundary.

    No random state: every draw is a function of (seed, step) or (seed, epoch, sample).
    """

    student: dict[str, Tensor]
    teacher: dict[str, Tensor]
    terms: dict[str, Tensor]
    optimizer: dict[str, Any]
    trainer: dict[str, Any]
    config: str


def save(checkpoint: Checkpoint, run: Path, keep_last: int, is_best: bool) -> Path:
    """Write `checkpoint` into the run directory `run`, move the pointers, drop old checkpoints."""
    folder = run / "checkpoints"
    final = folder / f"step_{checkpoint.trainer['step']:08d}"
    draft = folder / f".{final.name}.writing"
    for litter in folder.glob(".*.writing"):
        shutil.rmtree(litter)
    draft.mkdir(parents=True)
    metadata = weights_metadata(checkpoint.config)
    for name in TENSORS:
        save_file(
            {key: value.contiguous() for key, value in getattr(checkpoint, name).items()},
            draft / f"{name}.safetensors",
            metadata,
        )
    torch.save(checkpoint.optimizer, draft / "optimizer.pt")
    (draft / "trainer.json").write_text(json.dumps(checkpoint.trainer, indent=2, allow_nan=False))
    (draft / "config.yaml").write_text(checkpoint.config, encoding="utf-8")
    for path in draft.iterdir():
        share(path)
    for path in (*draft.iterdir(), draft):
        flush_to_disk(path)
    if final.exists():  # of a run that was resumed from an earlier step
        shutil.rmtree(final)
    draft.rename(final)
    flush_to_disk(folder)
    point(run, LAST, final)
    if is_best:
        point(run, BEST, final)
    rotate(run, keep_last)
    return final


def weights_metadata(config: str) -> dict[str, str]:
    """What a weights file says of itself: how to build its backbone, whatever becomes of the folder."""
    read: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(config)))
    backbone = {"name": read.backbone.name, "options": backbone_options(read)}
    return {"nestling": json.dumps({"backbone": backbone})}


def load(path: Path) -> Checkpoint:
    """Read the checkpoint folder `path`."""
    try:
        tensors = {name: load_file(path / f"{name}.safetensors") for name in TENSORS}
        return Checkpoint(
            **tensors,
            optimizer=torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True),
            trainer=json.loads((path / "trainer.json").read_text()),
            config=(path / "config.yaml").read_text(encoding="utf-8"),
        )
    except FileNotFoundError as error:
        raise UserError(
            f"{path} is not a complete checkpoint: {Path(error.filename).name} is missing"
        ) from error
    except DAMAGES as error:
        raise UserError(f"{path} is damaged ({error}); delete it to go on from the one before") from error


def load_trainer(path: Path) -> dict[str, Any]:
    """The plain facts of the checkpoint folder `path`: its step, its global batch and the like."""
    try:
        content: dict[str, Any] = json.loads((path / "trainer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path / 'trainer.json'} can't be read ({error}); delete {path} to go on from the one before"
        ) from error
    return content


def point(run: Path, name: str, target: Path) -> None:
    """Let the pointer file `name` hold the path of `target`, relative to the run."""
    draft = run / f".{name}.writing"
    draft.write_text(target.relative_to(run).as_posix() + "\n")
    flush_to_disk(draft)
    os.replace(draft, run / name)
    flush_to_disk(run)


def pointed(run: Path, name: str) -> Path | None:
    """The checkpoint that a pointer names, where both exist."""
    try:
        target = run / (run / name).read_text().strip()
    except FileNotFoundError:
        return None
    return target if target.is_dir() else None


def saved(run: Path) -> list[Path]:
    """All complete checkpoints of a run, oldest first."""
    found = [path for path in (run / "checkpoints").glob("step_*") if re.fullmatch(r"step_\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def newest(run: Path) -> Path | None:
    """The last complete checkpoint: a kill between the rename and the pointer loses nothing."""
    return next(reversed(saved(run)), None)


def rotate(run: Path, keep_last: int) -> None:
    """Delete all but the `keep_last` newest and the best."""
    best = pointed(run, BEST)
    for path in saved(run)[:-keep_last]:
        if path != best:
            shutil.rmtree(path)


def share(path: Path) -> None:
    """Give a file the rights that the user's umask says: safetensors makes its own for the owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def flush_to_disk(path: Path) -> None:
    """fsync a file or a folder, so that a rename can't overtake its contents."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders and orders renames itself
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
