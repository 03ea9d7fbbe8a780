"""From a checkpoint to a folder that another program loads, complete and compared, or absent."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nestling.ssl.errors import UserError
from nestling.ssl.export.huggingface import HuggingFace
from nestling.ssl.export.onnx import Onnx
from nestling.ssl.export.own import Own
from nestling.ssl.export.sizes import Size
from nestling.ssl.export.subject import Subject
from nestling.ssl.export.target import Network, Target
from nestling.ssl.export.timm import Timm
from nestling.ssl.export.torch_export import TorchExport
from nestling.ssl.run.checkpoints import flush_to_disk
from nestling.ssl.run.directory import installed, write_json

TARGETS: dict[str, Target] = {
    target.name: target for target in (Own(), Timm(), HuggingFace(), Onnx(), TorchExport())
}
RECORD = "export.json"


def export(subject: Subject, target: Target, out: Path, overwrite: bool = False) -> dict[str, Any]:
    """Write `subject` as `target` into the folder `out`, load it back and compare; returns the record.

    Raises:
        UserError: `out` is taken, the layout can't hold the backbone, or what was loaded back differs.
    """
    refuse_taken(out, overwrite)
    with draft_of(out) as draft:
        record = {"target": target.name, "checkpoint": subject.checkpoint, **subject.facts()}
        record |= target.write(subject, draft)
        record |= {"tolerance": target.tolerance, **compared(subject, target, draft)}
        record["versions"] = {name: installed(name) for name in ("nestling", "torch", *target.packages)}
        record["files"] = sorted(path.name for path in draft.iterdir())
        write_json(draft / RECORD, record)
        for path in (*draft.iterdir(), draft):
            flush_to_disk(path)
    return record


def refuse_taken(out: Path, overwrite: bool) -> None:
    """Refuse a place that holds anything but an earlier export that may be replaced."""
    if not out.exists():
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
def draft_of(out: Path) -> Iterator[Path]:
    """A folder beside `out` that takes its place at the end, or vanishes where something fails."""
    draft = out.with_name(f".{out.name}.writing")
    try:
        shutil.rmtree(draft, ignore_errors=True)  # of an export that was killed
        draft.mkdir(parents=True)
        yield draft
        old = out.with_name(f".{out.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if out.exists():
            out.rename(old)
        draft.rename(out)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise UserError(f"out={out} can't be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def compared(subject: Subject, target: Target, folder: Path) -> dict[str, Any]:
    """The largest difference of what was written, at each size; null where its program isn't installed.

    Raises:
        UserError: a difference is above the target's tolerance.
    """
    if not target.can_read():
        reason = f"not checked: {target.loader} is not installed"
        return {"checked": reason, "largest_difference": None, "sizes": {}}
    network = target.read(folder)
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
