"""Checkpoints: a folder per saved step, complete or absent.

    checkpoints/step_00001200/
        student.safetensors  teacher.safetensors  terms.safetensors
        judged.safetensors              where features are judged without labels: neighbours found last
        optimizer.pt                    loads with torch.load(weights_only=True)
        trainer.json  config.yaml       plain types and text
        manifest.json                   size and checksum of each

A folder is written under a hidden name, flushed to disk and renamed; only then do the pointers
`last` and `best` move and old folders go, so a kill at any instant leaves a complete newest one.
"""

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from functools import lru_cache
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
from nestling.ssl.names import printable
from nestling.ssl.run import manifest
from nestling.ssl.run.disk import draft_of, flush_to_disk, free_bytes, replaced, share

logger = logging.getLogger("nestling")

TENSORS = ("student", "teacher", "terms")
JUDGED = "judged.safetensors"
LAST, BEST = "last", "best"
KEPT = "kept"  # an empty file that keeps a checkpoint for good
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
    judged: dict[str, Tensor] = field(default_factory=dict)  # of the last evaluation, for the next one

    def copied(self) -> "Checkpoint":
        """The same in host memory of its own, which nothing that training does next can change."""
        return Checkpoint(**{field.name: _copied(getattr(self, field.name)) for field in fields(self)})

    def num_bytes(self) -> int:
        """What its tensors take."""
        return sum(_num_bytes(getattr(self, field.name)) for field in fields(self))


def _copied(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.detach().to("cpu", copy=True)
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    return type(tree)(_copied(value) for value in tree) if isinstance(tree, list | tuple) else tree


def _num_bytes(tree: Any) -> int:
    if isinstance(tree, Tensor):
        return tree.nbytes
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return sum(_num_bytes(value) for value in values)


def save(checkpoint: Checkpoint, run: Path, keep_last: int, is_best: bool) -> Path:
    """Write `checkpoint` into the run directory `run`, move the pointers, drop old checkpoints."""
    final = write(checkpoint, run)
    settle(run, final, keep_last, is_best)
    return final


def folder_of(run: Path, step: int) -> Path:
    """Where the checkpoint of a step lies, if it was saved."""
    return run / "checkpoints" / f"step_{step:08d}"


def write(checkpoint: Checkpoint, run: Path) -> Path:
    """Write the folder of `checkpoint`: complete, or nothing is left of it."""
    folder = run / "checkpoints"
    final = folder_of(run, checkpoint.trainer["step"])
    draft = folder / f".{final.name}.writing"
    clear_litter(run)
    try:
        draft.mkdir(parents=True)
        if free_bytes(folder) < checkpoint.num_bytes():  # else it would fill the disk of others too
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(draft))
        _write_files(checkpoint, draft)
        if final.exists():  # damaged, and passed over by the run that goes on
            remove(final)
        draft.rename(final)
        flush_to_disk(folder)
    except BaseException:
        clear_litter(run)
        raise
    return final


def _write_files(checkpoint: Checkpoint, draft: Path) -> None:
    metadata = weights_metadata(checkpoint.config)
    for name in TENSORS:
        save_file(
            {key: value.contiguous() for key, value in getattr(checkpoint, name).items()},
            draft / f"{name}.safetensors",
            metadata,
        )
    if checkpoint.judged:
        save_file(checkpoint.judged, draft / JUDGED)
    with (draft / "optimizer.pt").open("wb") as file:  # of a path torch would tell no reason of a failure
        torch.save(checkpoint.optimizer, file)
    (draft / "trainer.json").write_text(json.dumps(checkpoint.trainer, indent=2, allow_nan=False))
    (draft / "config.yaml").write_text(checkpoint.config, encoding="utf-8")
    manifest.write(draft)
    for path in draft.iterdir():
        share(path)
    for path in (*draft.iterdir(), draft):
        flush_to_disk(path)


def settle(run: Path, final: Path, keep_last: int, is_best: bool) -> None:
    """After a checkpoint was written: move the pointers, drop old checkpoints."""
    point(run, LAST, final)
    if is_best:
        point(run, BEST, final)
    rotate(run, keep_last)


@lru_cache(maxsize=4)
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
            judged=load_file(path / JUDGED) if (path / JUDGED).exists() else {},
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
    with replaced(run / name) as draft:
        draft.write_text(target.relative_to(run).as_posix() + "\n")


def recover(run: Path, resumed_from: Path | None) -> None:
    """At the start of a run: clear what a kill left, and let `last` name what it goes on from."""
    clear_litter(run)
    if resumed_from is not None and pointed(run, LAST) != resumed_from:
        point(run, LAST, resumed_from)


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


def newest(run: Path, names: Collection[str] | None = None) -> Path | None:
    """The last sound checkpoint: a kill between the rename and the pointer loses nothing.

    Newer ones whose files (or those of `names`) are missing, short or changed are passed over and named.

    Raises:
        UserError: there are checkpoints, and none is sound.
    """
    found = saved(run)
    for path in reversed(found):
        if is_sound(path, names):
            return path
    if found:
        fault = manifest.problem(found[-1], names)
        raise UserError(
            f"none of the {len(found)} checkpoints in {printable(run / 'checkpoints')} is whole (the newest, "
            f"{found[-1].name}: {fault}); bring one back from a copy, or train anew"
        )
    return None


def is_sound(path: Path, names: Collection[str] | None = None) -> bool:
    """Whether the files of a checkpoint (or those of `names`) are as they were written; else it is said."""
    fault = manifest.problem(path, names)
    if fault is not None:
        _warn_once(f"{printable(path)} is damaged and passed over: {fault}")
    return fault is None


@lru_cache(maxsize=256)
def _warn_once(message: str) -> None:
    logger.warning(message)


def rotate(run: Path, keep_last: int) -> None:
    """Delete all but the `keep_last` newest, the best and those kept for good.

    Those beyond `last` go too: they were damaged and passed over, and training writes them anew.
    """
    best, last = pointed(run, BEST), pointed(run, LAST)
    found = saved(run)
    lost = found[found.index(last) + 1 :] if last in found else []
    old = [path for path in found if path not in lost][:-keep_last]
    for path in (*lost, *(path for path in old if path != best and not _is_kept(path))):
        remove(path)


def keep(path: Path) -> None:
    """Let a checkpoint that is saved already be kept for good."""
    with replaced(path / KEPT) as draft:
        draft.touch()


def _is_kept(path: Path) -> bool:
    """Whether it was saved to be kept for good; one that can't say so is damaged."""
    try:
        return (path / KEPT).exists() or bool(load_trainer(path).get("kept"))
    except UserError:
        return False


def remove(path: Path) -> None:
    """Delete a checkpoint: gone at once, so that a kill leaves no half of it under its name.

    A file that another program holds open on a network disk stays hidden until the next checkpoint.
    """
    doomed = path.with_name(f".{path.name}.deleting")
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def clear_litter(run: Path) -> None:
    """Delete what a kill or a full disk left half written or half deleted."""
    for litter in (run / "checkpoints").glob(".step_*"):
        if litter.suffix in (".writing", ".deleting"):
            shutil.rmtree(litter, ignore_errors=True)
    for pointer in (LAST, BEST):
        draft_of(run / pointer).unlink(missing_ok=True)
