"""The run directory: who may write into it, and what it says about the run."""

import json
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from nestling.ssl.config import Config
from nestling.ssl.errors import UserError
from nestling.ssl.run import checkpoints

RECORDED = ("torch", "torchvision", "lightly", "accelerate", "omegaconf", "faiss-cpu", "numpy", "pillow")
FREE_ON_RESUME = (
    "out",
    "resume",
    "overwrite",
    "data.num_workers",
    "data.start_method",
    "knn.",
    "log.",
    "train.keep_last",
)


def claim(config: Config) -> Path | None:
    """Make `config.out` ready; returns the checkpoint to go on from, if any.

    Raises:
        UserError: `out` holds something already and neither resume nor overwrite allows it.
    """
    out = Path(config.out)
    if out.exists() and not out.is_dir():
        raise UserError(f"out={out} is a file; name a folder for the run")
    is_run = (out / "config.yaml").is_file()
    if out.is_dir() and any(out.iterdir()):
        if not is_run:
            raise UserError(f"out={out} holds files that are no run of nestling; name an empty or new folder")
        if config.overwrite:
            shutil.rmtree(out)
        elif config.resume == "never":
            raise UserError(
                f"out={out} holds a run already; resume=auto continues it, overwrite=true deletes it"
            )
    out.mkdir(parents=True, exist_ok=True)
    return checkpoints.newest(out)


def refuse_changes(old: dict[str, Any], new: dict[str, Any], out: str) -> None:
    """Refuse to continue a run under other settings than it began with.

    Both are flat: dotted key to value. Where things run and what is logged may change.
    """
    for key in sorted(old.keys() | new.keys()):
        if not key.startswith(FREE_ON_RESUME) and old.get(key) != new.get(key):
            raise UserError(
                f"the run in out={out} began with {key}={old.get(key)}, now it is {new.get(key)}: "
                "give the old value to continue it, or another out for a new run"
            )


def environment() -> dict[str, Any]:
    """Versions, platform, git revision and dirty flag, for the record."""
    return {
        "nestling": installed("nestling"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: installed(name) for name in RECORDED},
        "git": git("rev-parse", "HEAD"),
        "git_dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
    }


def installed(name: str) -> str | None:
    """The installed version of a package."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def git(*arguments: str) -> str | None:
    """What git says about the checkout this package runs from; None outside one."""
    here = Path(__file__).parent
    try:
        answer = subprocess.run(
            ("git", *arguments), cwd=here, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def write_json(path: Path, content: Any) -> None:
    """Indented, strict JSON."""
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
