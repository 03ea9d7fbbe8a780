"""From a checkpoint to a folder that another program loads, complete and compared, or absent."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from nestling.ssl.errors import UserError
from nestling.ssl.export.huggingface import HuggingFace
from nestling.ssl.export.onnx import Onnx
from nestling.ssl.export.own import Own
from nestling.ssl.export.sizes import Size
from nestling.ssl.export.subject import Subject
from nestling.ssl.export.target import Network, Target
from nestling.ssl.export.timm import Timm
from nestling.ssl.export.torch_export import TorchExport
from nestling.ssl.run.directory import installed, write_json
from nestling.ssl.run.disk import flush_to_disk, share

TARGETS: dict[str, Target] = {
    target.name: target for target in (Own(), Timm(), HuggingFace(), Onnx(), TorchExport())
}
RECORD = "export.json"


def export(subject: Subject, target: Target, out: Path, overwrite: bool = False) -> dict[str, Any]:
    """Write `subject` as `target` into the folder `out`, load it back and compare; returns the record.

    Raises:
        UserError: `out` is taken, the layout can't hold the backbone, or what was loaded back differs.
    """
    place = out.resolve()  # of a link the folder that it leads to
    with writing(out):
        bring_back(place)
    refuse_taken(out, overwrite)
    with draft_of(place, out) as draft:
        record = {"target": target.name, "checkpoint": subject.checkpoint, **subject.facts()}
        with writing(out):
            record |= target.write(subject, draft)
        record |= {"tolerance": target.tolerance, **compared(subject, target, draft)}
        record["versions"] = {name: installed(name) for name in ("nestling", "torch", *target.packages)}
        with writing(out):
            record["files"] = sorted(path.name for path in draft.iterdir())
            write_json(draft / RECORD, record)
            for path in draft.iterdir():
                share(path)
            for path in (*draft.iterdir(), draft):
                flush_to_disk(path)
    return record


def refuse_taken(out: Path, overwrite: bool) -> None:
    """Refuse a place that holds anything but an earlier export that may be replaced."""
    if out.resolve() == Path.cwd():
        raise UserError(f"out={out} is the working directory, which can't be replaced; name a folder in it")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    try:
        ours = {RECORD, *json.loads((out / RECORD).read_text(encoding="utf-8"))["files"]}
    except (OSError, ValueError, LookupError, TypeError):
        raise UserError(f"out={out} exists and is no export of nestling; name a new folder") from None
    if not overwrite:
        raise UserError(f"out={out} holds an export; overwrite=true replaces it, out=FOLDER writes elsewhere")
    others = sorted({path.name for path in out.iterdir()} - ours)
    if others:
        raise UserError(f"out={out} holds {others[0]} besides an export, which overwrite=true would delete")


@contextmanager
def draft_of(place: Path, out: Path) -> Iterator[Path]:
    """A folder beside `place` that takes its place at the end, or vanishes where something fails."""
    draft = place.with_name(f".{place.name}.writing")
    try:
        with writing(out):
            shutil.rmtree(draft, ignore_errors=True)  # of an export that was killed
            draft.mkdir(parents=True)
        yield draft
        with writing(out):
            take_place(draft, place)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def take_place(draft: Path, place: Path) -> None:
    """Rename `draft` to `place`; what was there is kept until that is on disk."""
    old = replaced(place)
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        place.rename(old)
    try:
        draft.rename(place)
    finally:
        bring_back(place)
    flush_to_disk(place.parent)
    shutil.rmtree(old, ignore_errors=True)


def bring_back(place: Path) -> None:
    """Undo the half of an exchange that was killed between its two renames."""
    old = replaced(place)
    if old.exists() and not place.exists():
        old.rename(place)


def replaced(place: Path) -> Path:
    """Where a folder waits while a new one takes its place."""
    return place.with_name(f".{place.name}.old")


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Say in a sentence that a file or folder can't be written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"out={out} can't be written: {error.strerror or error}") from error
    except SafetensorError as error:  # so a full disk is reported
        raise UserError(f"out={out} can't be written: {error}") from error


def compared(subject: Subject, target: Target, folder: Path) -> dict[str, Any]:
    """The largest difference of what was written, at each size; null where its program isn't installed.

    Raises:
        UserError: it can't be loaded back, or a difference is above the target's tolerance.
    """
    if not target.can_read():
        reason = f"not checked: {target.loader} is not installed"
        return {"checked": reason, "largest_difference": None, "sizes": {}}
    try:
        network = target.read(subject, folder)
    except (ValueError, OSError) as error:  # transformers raises both
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{subject.name} exported to {target.name} can't be loaded back ({said}); nothing was left behind"
        ) from error
    sizes: dict[str, float] = {}
    for number, size in enumerate(target.sizes(subject)):
        found, largest = difference(subject, network, size, batch=1 + 2 * number)
        sizes["x".join(map(str, size))] = found
        if not found <= target.tolerance * max(1.0, largest):
            raise UserError(
                f"{subject.name} exported to {target.name} differs by {found:.2g} at {size[0]} x {size[1]} "
                f"pixels, above the tolerance of {target.tolerance:.2g}; nothing was left behind"
            )
    return {"checked": "loaded back", "largest_difference": max(sizes.values()), "sizes": sizes}


@torch.no_grad()
def difference(subject: Subject, network: Network, size: Size, batch: int = 2) -> tuple[float, float]:
    """The largest difference of any feature on images of noise, and the largest feature.

    Infinite where the shapes differ, nan where either side has one.
    """
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, len(subject.mean), *size, generator=generator)
    images = images.to(next(subject.backbone.parameters()).dtype)
    features = subject.backbone(images)
    pairs = list(zip((features.cls, features.patches), network(images), strict=True))
    if any(ours.shape != theirs.shape for ours, theirs in pairs):
        return float("inf"), 0.0
    found = torch.stack([(ours - theirs).abs().max() for ours, theirs in pairs]).max()
    largest = torch.stack([ours.abs().max() for ours, _ in pairs]).max()
    return float(found), float(largest)
