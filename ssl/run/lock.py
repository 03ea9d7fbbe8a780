"""One start at a time in a run directory: a lock that the kernel lets go when its holder is gone.

`flock` on a file that stays open. A record lock (`lockf`) would be dropped as soon as anything in this
process closes another handle of the file. What flock leaves to forked children, and so to loaders that
outlive a killed run, is closed in each child as it starts.
"""

import errno
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nestling.ssl.errors import UserError
from nestling.ssl.names import printable

logger = logging.getLogger("nestling")

FILE = "run.lock"
TAKEN = (errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK, errno.EDEADLK)
# What file systems without locks say, such as Lustre mounted without them or NFS without its daemon.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)

LOOKS, INSTANT = 4, 0.05  # seconds

_held: dict[Path, int] = {}  # the files of this process, by handle

if sys.platform == "win32":
    import msvcrt

    def _lock(handle: int) -> None:
        """Windows lets nobody read what is locked: a byte far beyond the text."""
        os.lseek(handle, 1 << 20, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        os.lseek(handle, 0, os.SEEK_SET)

else:
    import fcntl

    def _lock(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def hold(folder: Path) -> None:
    """Keep every other start out of `folder` until this process lets go or ends, however it ends.

    Where the file system has no locks, a warning says so and the run goes on.

    Raises:
        UserError: another start holds it.
        OSError: the file of the lock can't be made.
    """
    path = folder.absolute() / FILE
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock_patiently(handle)
        except OSError as error:
            os.close(handle)
            if error.errno in TAKEN:
                raise UserError(_refusal(folder, path)) from error
            if error.errno not in NO_LOCKS:
                raise
            logger.warning(
                f"out={printable(folder)}: its file system has no locks ({error.strerror}), so nothing would "
                "notice a second start in it"
            )
            path.unlink(missing_ok=True)
            return
        if _is_still(handle, path):
            break
        os.close(handle)  # whoever held it has just deleted it
    _held[path] = handle
    _sign(handle, path)


def _lock_patiently(handle: int) -> None:
    """Another start that only looks, as `refuse_held` does, has it for an instant, as has a fresh child."""
    for look in range(LOOKS):
        try:
            _lock(handle)
            break
        except OSError as error:
            if error.errno not in TAKEN or look == LOOKS - 1:
                raise
            time.sleep(INSTANT)


def refuse_held(folder: Path) -> None:
    """Refuse a folder that another start holds, or whose file of that name is a stranger's; touches nothing.

    Raises:
        UserError: either.
    """
    path = folder.absolute() / FILE
    try:
        handle = os.open(path, os.O_RDWR)
    except OSError:  # none there, or none that this user may write: `hold` tells
        return
    try:
        if os.fstat(handle).st_size and not _said(path):
            raise UserError(f"{printable(path)} is no lock of nestling; name another out")
        if path not in _held:
            _lock_patiently(handle)
    except OSError as error:
        if error.errno in TAKEN:
            raise UserError(_refusal(folder, path)) from error
    finally:
        os.close(handle)


def _refusal(folder: Path, path: Path) -> str:
    holder = _told(_said(path))
    return f"out={printable(folder)} is held by {holder}: wait for its end, stop it, or name another out"


def _is_still(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _sign(handle: int, path: Path) -> None:
    """Say in the file who holds it; a full disk may keep it from that, which the lock survives."""
    left = _said(path)
    host = socket.gethostname()
    if left.get("host", host) != host:
        logger.warning(
            f"{printable(path)} was left behind by {_told(left)}; locks of some network disks reach one "
            "machine only, so make sure that it has ended"
        )
    content = {"host": host, "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
    try:
        os.ftruncate(handle, 0)
        os.write(handle, json.dumps(content).encode())
    except OSError as error:
        logger.warning(f"{printable(path)} can't say who holds it: {error.strerror}")


def _said(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _told(content: dict[str, object]) -> str:
    if not {"host", "pid", "since"} <= content.keys():  # taken a moment ago, or on a full disk
        return "a process"
    return f"process {content['pid']} on {content['host']}, there since {content['since']}"


def let_go() -> None:
    """Give back what this process holds."""
    while _held:
        path, handle = _held.popitem()
        try:
            if os.name != "nt":  # while it is still held, else it could be the next one's
                with suppress(OSError):  # a file that stays holds nobody up
                    path.unlink()
        finally:
            os.close(handle)


@contextmanager
def let_go_at_the_end() -> Iterator[None]:
    """Give back, whatever happens inside, what was taken there."""
    try:
        yield
    finally:
        let_go()


def _forget() -> None:
    """In a forked child: its copies of the handles would hold on after its parent is gone."""
    while _held:
        os.close(_held.popitem()[1])


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
