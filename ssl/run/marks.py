"""What marks a folder as one that a run of nestling wrote; imported by those who must not import a run."""

import json
from pathlib import Path

ENVIRONMENT = "environment.json"


def is_run(folder: Path) -> bool:
    """Whether nestling wrote a run there: many programs write a config.yaml, none our environment.json."""
    try:
        content = json.loads((folder / ENVIRONMENT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and "nestling" in content
