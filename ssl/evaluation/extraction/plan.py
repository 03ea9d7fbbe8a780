"""What an extraction's numbers depend on, and whether a folder was begun with the same."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nestling.ssl.data.channels import normalisation
from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.ledger import FILE as UNREADABLE
from nestling.ssl.data.sources.base import ImageSource
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.extraction import parts
from nestling.ssl.evaluation.extraction.formats import file_name
from nestling.ssl.evaluation.extraction.images import dataset_sha256
from nestling.ssl.evaluation.extraction.settings import FORMATS, ExtractFeatures
from nestling.ssl.names import printable
from nestling.ssl.run.directory import write_json
from nestling.ssl.run.disk import draft_of
from nestling.ssl.trained import Trained, weights_sha256

FEATURES, ROWS = "features.json", "rows.jsonl"
SAME_ROWS = ("pooling", "dtype", "size", "crop_ratio", "precision", "batch_size")


def plan_of(
    trained: Trained, settings: ExtractFeatures, source: ImageSource, size: int, crop_ratio: float
) -> dict[str, Any]:
    """All of it, as JSON holds it; messages name its keys."""
    mean, std = normalisation(trained.config.data)
    plan = {
        "weights' sha256": weights_sha256(trained.file),
        "network": trained.network,
        **{name: getattr(settings, name) for name in SAME_ROWS},
        "size": size,
        "crop_ratio": crop_ratio,
        "mean": mean,
        "std": std,
        "decoding": asdict(Decoder.of(trained.config.data)),
        "number of images": len(source),
        "hash of paths and labels": dataset_sha256(source),
    }
    return dict(json.loads(json.dumps(plan)))


def claim(out: Path, plan: Mapping[str, Any], part: int, settings: ExtractFeatures) -> int | None:
    """Make `out` ready to be extracted into; returns the images of a part, None where all is done already.

    A part's size is that of the beginning: it changes no number.

    Raises:
        UserError: `out` holds something else, or was begun with another plan, or can't be made.
    """
    try:
        if out.exists() and not out.is_dir():
            raise UserError(f"out={printable(out)} is a file; name a folder for the features")
        found, begun = _begun(out)
        if found is not None and not settings.overwrite:
            _refuse_changes(found["plan"], plan, out)
            if begun is None:
                _refuse_incomplete(out, found, settings.formats)
                shutil.rmtree(out / parts.FOLDER, ignore_errors=True)
                return None
            return int(begun)
        if found is None and out.is_dir() and any(out.iterdir()):
            raise UserError(f"out={printable(out)} holds files that are no extraction; name a new folder")
        (out / parts.FOLDER).mkdir(parents=True, exist_ok=True)
        if found is not None:
            _delete_parts(out)
        write_json(out / parts.FOLDER / parts.PLAN, {"plan": plan, "part": part})
        if found is not None:
            _delete_files(out, found["plan"]["pooling"])
    except OSError as error:
        raise UserError(f"out={printable(out)} can't be used: {error.strerror} ({error.filename})") from error
    return part


def _begun(out: Path) -> tuple[dict[str, Any] | None, int | None]:
    """What the folder says of its extraction, and while that isn't finished its images of a part."""
    for file in (out / FEATURES, out / parts.FOLDER / parts.PLAN):
        if file.is_file():
            try:
                found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
                return found, (None if file.name == FEATURES else int(found["part"]))
            except (ValueError, KeyError) as error:
                raise UserError(f"{printable(file)} is damaged; delete out={printable(out)}") from error
    return None, None


def _refuse_changes(old: Mapping[str, Any], new: Mapping[str, Any], out: Path) -> None:
    for name in new:
        if old.get(name) != new[name]:
            raise UserError(
                f"the extraction in out={printable(out)} began with {name}={old.get(name)}, now it is "
                f"{new[name]}: name another out, or delete what is there with overwrite=true"
            )


def _refuse_incomplete(out: Path, found: Mapping[str, Any], formats: list[str]) -> None:
    if sorted(found["formats"]) != sorted(set(formats)):
        raise UserError(
            f"out={printable(out)} holds a finished one with formats={found['formats']}, not {formats}: "
            "name another out, or delete what is there with overwrite=true"
        )
    lost = [name for name in found["files"] if not (out / name).is_file()]
    if lost:
        raise UserError(f"out={printable(out)} lacks {lost[0]}; overwrite=true extracts all anew")


def _delete_parts(out: Path) -> None:
    for file in (out / parts.FOLDER).iterdir():
        if file.name != parts.PLAN:  # which says whose folder it is until the new one is there
            file.unlink()


def _delete_files(out: Path, poolings: list[str]) -> None:
    """What an extraction of these poolings writes, no more; the mark of a finished one goes first."""
    names = [file_name(pooling, file_format) for pooling in poolings for file_format in FORMATS]
    for name in (FEATURES, ROWS, UNREADABLE, *names):
        (out / name).unlink(missing_ok=True)
        draft_of(out / name).unlink(missing_ok=True)
