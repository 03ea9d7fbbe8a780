"""Folders and links that permissions keep from us: passed over by name, and tried again."""

import errno
import os
import shutil
import tempfile
from contextlib import contextmanager

import pytest
from planting import plant, settle

from nestling.ssl.data.sources.folder import Folder
from nestling.ssl.errors import UserError


@contextmanager
def as_another():
    """Without root's rights, where root runs the tests."""
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.fixture
def root():
    """A settled folder with one below that this process may not enter, and room for a cache beside it."""
    place = tempfile.mkdtemp()
    root = os.path.join(place, "images")
    plant(root, "a/1.png", "locked/2.png")
    settle(root)
    os.mkdir(os.path.join(place, "cache"))
    os.chmod(place, 0o755)
    os.chmod(os.path.join(place, "cache"), 0o777)
    os.chmod(os.path.join(root, "locked"), 0)
    yield root
    os.chmod(os.path.join(root, "locked"), 0o755)
    shutil.rmtree(place)


def opened(root):
    with as_another():
        return Folder(root, cache=os.path.join(os.path.dirname(root), "cache"))


def names_in(folder):
    return [os.path.relpath(folder.path(i), folder.name) for i in range(len(folder))]


def test_a_locked_subfolder_is_passed_over_by_name(root):
    folder = opened(root)
    assert names_in(folder) == ["a/1.png"]
    assert folder.passed_over == "1 folder that can't be opened (locked)"


def test_a_locked_root_is_an_error(root):
    locked = os.path.join(root, "locked")
    expected = rf"can't be read: {os.strerror(errno.EACCES)} \({locked}\)"
    with as_another(), pytest.raises(UserError, match=expected):
        Folder(locked)


def test_a_link_into_a_locked_folder_is_not_called_broken(root):
    os.symlink("../locked/2.png", os.path.join(root, "a", "link.png"))
    os.symlink("nowhere", os.path.join(root, "a", "other.png"))
    assert opened(root).passed_over == (
        "1 broken link (a/other.png), 1 link that can't be reached (a/link.png), "
        "1 folder that can't be opened (locked)"
    )


def test_a_second_start_takes_what_the_first_found_beside_a_locked_folder(root):
    opened(root)
    before = os.stat(os.path.join(root, "a"))
    plant(root, "a/0.png")
    os.utime(os.path.join(root, "a"), ns=(before.st_atime_ns, before.st_mtime_ns))
    assert names_in(opened(root)) == ["a/1.png"]


def test_a_folder_that_was_unlocked_is_found_by_the_next_start(root):
    assert names_in(opened(root)) == ["a/1.png"]
    os.chmod(os.path.join(root, "locked"), 0o755)  # no time of change tells of it
    assert names_in(opened(root)) == ["a/1.png", "locked/2.png"]
