"""The disk that a run writes to: flushed, measured, and known when it is full."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from nestling.ssl.config import Config
from nestling.ssl.distillation import SelfDistillation
from nestling.ssl.errors import UserError
from nestling.ssl.names import printable

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no room, the user's quota, a limit on file sizes
MOMENTS = {"adamw": 2, "sgd": 1, "lars": 1}  # tensors an optimizer keeps per parameter
UNITS = ("bytes", "kB", "MB", "GB", "TB")


def share(path: Path) -> None:
    """Give a file the rights that the user's umask says: safetensors makes its own for the owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def flush_to_disk(path: Path) -> None:
    """fsync a file or a folder, so that a rename can't overtake its contents."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders and orders renames itself
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def draft_of(path: Path) -> Path:
    """Where the next content of a file is written before it takes its place."""
    return path.with_name(f".{path.name}.writing")


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a draft to write, which then takes the place of `path`: the old content or the new, never less.

    Whatever is raised meanwhile, the old content stays and no draft.

    Raises:
        UserError: it can't be written, whichever library says so.
    """
    draft = draft_of(path)
    try:
        yield draft
        flush_to_disk(draft)
        os.replace(draft, path)
        flush_to_disk(path.parent)
    except BaseException as error:
        draft.unlink(missing_ok=True)
        number = reason(error) if isinstance(error, (OSError, SafetensorError, RuntimeError)) else None
        if number is None and not isinstance(error, (OSError, SafetensorError)):
            raise
        why = str(error) if number is None else os.strerror(number)
        raise UserError(f"{printable(path)} can't be written: {why}") from error


def reason(error: BaseException | None) -> int | None:
    """The system's error number behind an error, whichever library wraps it.

    safetensors gives it in its text, torch raises another error over the one of the file.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        told = re.search(r"\(os error (\d+)\)", str(error))
        if told:
            return int(told[1])
        error = error.__cause__ or error.__context__
    return None


def free_bytes(path: Path) -> int:
    """What may still be written where `path` is or would be."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def size(num_bytes: float) -> str:
    """A number of bytes for people, as in 1.2 GB."""
    unit = 0
    while num_bytes >= 1000 and unit < len(UNITS) - 1:
        num_bytes, unit = num_bytes / 1000, unit + 1
    return f"{num_bytes:.3g} {UNITS[unit]}"


def checkpoint_bytes(method: SelfDistillation, optimizer: str) -> int:
    """What a checkpoint takes once the optimizer has its moments, to a few kilobytes."""
    states = (method.student, method.teacher, method.terms)
    tensors = [tensor for state in states for tensor in state.state_dict().values()]
    trained = [parameter for parameter in method.student.parameters() if parameter.requires_grad]
    return sum(t.nbytes for t in tensors) + MOMENTS[optimizer] * sum(t.nbytes for t in trained)


def refuse_small(config: Config, method: SelfDistillation) -> None:
    """Refuse to begin a run whose disk can't hold two checkpoints: the old one stays until the new is whole.

    What `overwrite` deletes counts as free. A run that goes on has proved its disk.

    Raises:
        UserError: with what two take and what is free.
    """
    out = Path(config.out).absolute()
    try:
        old = [path for path in (out / "checkpoints").rglob("*") if path.is_file()]
        free = free_bytes(out) + sum(path.stat().st_size for path in old)
    except OSError:
        return  # a folder that can't be looked into is refused when it is claimed, for the reason it has
    needed = 2 * checkpoint_bytes(method, config.optim.name)
    if free < needed and (config.overwrite or not old):
        raise UserError(
            f"out={printable(out)}: the disk has {size(free)} free and two checkpoints of this run take "
            f"{size(needed)}; make room, or name an out on a larger disk"
        )
