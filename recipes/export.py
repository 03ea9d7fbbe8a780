"""Take a trained backbone elsewhere: to timm, transformers, ONNX or torch alone, compared with the original.

    python recipes/export.py runs/pretrain --to timm
    python recipes/export.py runs/pretrain/checkpoints/step_00001000 --to onnx out=exported

A run directory stands for its best checkpoint, else its newest. What is written is loaded back where
the program that loads it is installed, and export.json states the largest difference.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nestling.ssl.command_line import read, run
from nestling.ssl.config import key


@dataclass
class Export:
    """One export."""

    checkpoint: str = key("???", "run directory, or one of its checkpoint folders")
    to: str = key(
        "???",
        "who loads it: nestling.backbones.load, timm, transformers, an ONNX runtime, torch.export.load",
        choices=("nestling", "timm", "hf", "onnx", "torch_export"),
    )
    network: str = key("teacher", "whose backbone", choices=("teacher", "student"))
    out: str | None = key(None, "folder to write; null: export_<to> in the checkpoint folder")
    overwrite: bool = key(False, "replace an earlier export in out")


def main(argv: list[str]) -> None:
    """Export one checkpoint; prints where it is and how far it differs."""
    settings = read(
        Export,
        argv,
        program="recipes/export.py",
        about=__doc__ or "",
        positional=("checkpoint",),
        options=("to",),
    )
    if os.environ.get("RANK", "0") != "0":  # one process of a launcher's writes
        return
    # Late, as all of these import torch: --help answers at once.
    from nestling.ssl.export.exporting import TARGETS, export
    from nestling.ssl.export.subject import load_subject
    from nestling.ssl.run.loading import find_checkpoint

    checkpoint = find_checkpoint(settings.checkpoint)
    out = Path(settings.out) if settings.out else checkpoint / f"export_{settings.to}"
    record = export(load_subject(checkpoint, settings.network), TARGETS[settings.to], out, settings.overwrite)
    report(record, checkpoint, out)


def report(record: dict[str, Any], checkpoint: Path, out: Path) -> None:
    """Say what was written and how it was checked."""
    print(f"{record['network']} of {checkpoint}, {record['backbone']['name']}, to {record['target']}")
    for size, difference in record["sizes"].items():
        print(f"largest difference at {size.replace('x', ' x ')} pixels: {difference:.2g}")
    if not record["sizes"]:
        print(record["checked"])
    elif f"{record['side']}x{record['side']}" not in record["sizes"]:
        print(
            f"not compared at {record['side']} pixels, the run's own size, where {record['target']} computes "
            "otherwise: docs/export.md says how and by how much"
        )
    print(f"written to {out}")


if __name__ == "__main__":
    run(main)
