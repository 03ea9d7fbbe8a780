"""Which file is meant by a path: a file, a run directory, a checkpoint folder, an exported folder."""

import json
from pathlib import Path
from typing import Any

FILES = ("model.safetensors", "pytorch_model.bin", "backbone.safetensors")
SUFFIXES = (".safetensors", ".bin", ".pth", ".pt")


def find_weights(path: Path, network: str) -> Path:
    """The file of weights.

    Raises ValueError where there is none, or more than one.
    """
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    if not path.is_dir():
        return path
    if any((path / f"{each}.safetensors").is_file() for each in ("teacher", "student")):
        return _of_checkpoint(path, network)
    for pointer in ("best", "last"):
        if (path / pointer).is_file():
            target = path / (path / pointer).read_text(encoding="utf-8").strip()
            if target.is_dir():
                return _of_checkpoint(target, network)
    steps = sorted((path / "checkpoints").glob("step_*"), key=lambda step: (len(step.name), step.name))
    if steps:
        return _of_checkpoint(steps[-1], network)
    for name in FILES:
        if (path / name).is_file():
            return path / name
    found = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file())
    if len(found) == 1:
        return found[0]
    listed = ", ".join(file.name for file in found) or f"none of {', '.join(FILES)}, nor checkpoints/step_*"
    raise ValueError(f"{path} is a folder without one file of weights ({listed}); name the file")


def _of_checkpoint(folder: Path, network: str) -> Path:
    file = folder / f"{network}.safetensors"
    if not file.is_file():
        raise ValueError(f"{file}: no such file; the checkpoint {folder} lacks its {network}")
    return file


def config_beside(file: Path) -> dict[str, Any]:
    """config.json of the file's folder, as Hugging Face and timm write it, or nothing.

    Raises ValueError for a damaged one.
    """
    path = file.parent / "config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no valid JSON ({error})") from error
    return config if isinstance(config, dict) else {}
