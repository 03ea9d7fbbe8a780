"""Disks without room, for real: a limit on the size of files, and a small disk where mounting is allowed."""

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

# Then the folder that becomes a disk of 4 MB, and the command that sees it.
SMALL_DISK = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=4m tmpfs "$0" && exec "$@"']


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """The system refuses this process to write beyond."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def can_mount() -> bool:
    """Whether SMALL_DISK works here."""
    try:
        return not subprocess.run([*SMALL_DISK, "/mnt", "true"], capture_output=True, check=False).returncode
    except FileNotFoundError:
        return False
