"""The run directory: who may write into it, and what it says about the run."""

import json
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from nestling.ssl.config import Config
from nestling.ssl.data import ledger
from nestling.ssl.errors import UserError
from nestling.ssl.run import checkpoints, lock
from nestling.ssl.run.disk import replaced
from nestling.ssl.run.marks import ENVIRONMENT, is_run
from nestling.ssl.views import render

RECORDED = (
    *("torch", "torchvision", "lightly", "accelerate", "omegaconf", "faiss-cpu", "numpy", "pillow"),
    *("torchmetrics", "pycocotools"),
)
CONFIG, LOG, PICTURE = "config.yaml", "log.jsonl", "picture.png"
NONFINITE, ASIDE = "nonfinite.json", "nonfinite"  # the step that was not finite; the state before it
TRACKED = "nestling"  # what trackers call the run, and their folder in it
WRITTEN = (
    *(CONFIG, ENVIRONMENT, LOG, PICTURE, NONFINITE, ledger.FILE, TRACKED),
    *("checkpoints", "results", checkpoints.LAST, checkpoints.BEST, ASIDE),
)
FREE_ON_RESUME = (
    *("out", "resume", "overwrite", "data.num_workers", "data.start_method", "log."),
    *("train.keep_last", "train.keep_every", "train.on_full_disk"),
    *("train.activation_checkpointing", "train.compile", "train.sharding", "train.max_hours", "train.on_nan"),
    *("expect_world_size", "data.cache", "data.root", "data.on_error", "data.max_bad_share"),
    "knn.batch_size",
    *("train.batch_size", "train.accumulation"),  # `changes` says what follows from another one
)


def claim(config: Config) -> Path | None:
    """Make `config.out` ready; returns the checkpoint to go on from, if any.

    No other start can claim it until this one lets go of its lock; that comes before all else.

    Raises:
        UserError: `out` holds something already and neither resume nor overwrite allows it, another
            start holds it, or it can't be made.
    """
    out = Path(config.out)
    try:
        refuse_taken(config)  # before a lock is written beside what may be a stranger's
        out.mkdir(parents=True, exist_ok=True)
        lock.hold(out)
        refuse_taken(config)
        if config.overwrite and is_run(out):
            delete_run(out)
    except OSError as error:
        raise UserError(f"out={out} can't be used: {error.strerror} ({error.filename})") from error
    return checkpoints.newest(out)


def refuse_taken(config: Config) -> None:
    """Refuse what can't become or go on as this run; touches nothing.

    Raises:
        UserError: `out` is a file, another start holds it, or it holds something that neither resume nor
            overwrite allows.
    """
    out = Path(config.out)
    if out.exists() and not out.is_dir():
        raise UserError(f"out={out} is a file; name a folder for the run")
    lock.refuse_held(out)
    if not out.is_dir() or all(path.name == lock.FILE for path in out.iterdir()):
        return
    if not is_run(out):
        raise UserError(f"out={out} holds files that are no run of nestling; name a new folder")
    if config.resume == "never" and not config.overwrite:
        raise UserError(f"out={out} holds a run; resume=auto continues it, overwrite=true deletes it")


def delete_run(folder: Path) -> None:
    """Delete what a run writes and nothing else; the mark of a run goes last."""
    for name in sorted(WRITTEN, key=ENVIRONMENT.__eq__):
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


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
    """Versions, platform, device, torch's threads, git revision and dirty flag, for the record."""
    return {
        "nestling": installed("nestling"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        # Only of CUDA that is in use: asking would begin its use.
        "device": torch.cuda.get_device_name() if torch.cuda.is_initialized() else processor(),
        "threads": torch.get_num_threads(),
        "packages": {name: installed(name) for name in RECORDED},
        "compiled_kernel": render.kernel is not None,
        "git": git("rev-parse", "HEAD"),
        "git_dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
    }


def processor() -> str:
    """The CPU's name, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor() or platform.machine(),
    )


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
    with replaced(path) as draft:
        draft.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def writable(out: Path) -> Path:
    """The file of the results, refused before the work where it can't be written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a"):
            pass
    except OSError as error:
        raise UserError(
            f"out={out} can't be written: {error.strerror}; name a file in a folder of yours"
        ) from error
    if not out.stat().st_size:
        out.unlink()
    return out
