"""One file for a backbone and what was trained on it: `backbone.…`, `head.…`, and facts in the metadata."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from nestling.backbones.weights import own
from nestling.ssl.run.disk import replaced, share

FILE = "model.safetensors"


def write_network(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write the file, whole or not at all; `backbones.load` finds the backbone in it.

    Raises:
        UserError: it can't be written.
    """
    held = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    with replaced(path) as draft:
        save_file(held, draft, {own.KEY: json.dumps(facts)})
        share(draft)


def file_of(path: str | Path) -> Path:
    """The file meant by a folder that a fine-tuning wrote, or the file itself."""
    path = Path(path).expanduser()
    return path / FILE if path.is_dir() else path


def read_head(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The facts, and the tensors beside the backbone under their own names.

    Raises OSError, SafetensorError, KeyError or ValueError where it is no such file.
    """
    with safe_open(file, "pt") as content:
        facts: dict[str, Any] = json.loads((content.metadata() or {})[own.KEY])
        names = content.keys()
        return facts, {name: content.get_tensor(name) for name in names if name.startswith("head.")}
