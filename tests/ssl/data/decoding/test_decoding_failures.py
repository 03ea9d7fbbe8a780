"""Images that can't be used: why, in few words, and whether the disk or the file is to blame."""

import logging
import os
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.decoding.reach import PATIENCE, PAUSE
from nestling.ssl.data.failures import UnreadableError

RGB = Decoder()
needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="there is no /proc/self/mem")


@pytest.fixture(autouse=True)
def a_disk_that_works(tmp_path):
    """What earlier tests failed to reach in this process is forgotten with the first file that is."""
    RGB.file(str(saved(tmp_path, "works.png")))


def refused(path, decoder=RGB):
    with pytest.raises(UnreadableError) as caught:
        decoder.file(str(path))
    assert caught.value.path == str(path)
    return caught.value


def saved(folder, name, side=64):
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / name)
    return folder / name


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty (0 bytes)"),
        (b"Hello, world", "is no image (starts with b'Hello, w')"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "is a PNG file that is damaged or of an unknown kind"),
        (b"\xff\xd8\xff\xe0", "is a JPEG file that is damaged or of an unknown kind"),
        (b"II*\0\x08\0\0\0", "is a TIFF file that is damaged or of an unknown kind"),
        (b"\x93NUMPY\x01", "is truncated"),
    ],
)
def test_what_is_no_image_is_refused_at_once_for_its_reason(tmp_path, content, reason):
    path = tmp_path / "broken.png"
    path.write_bytes(content)
    started = time.perf_counter()
    problem = refused(path)
    assert problem.reason == reason
    assert not problem.transient
    assert time.perf_counter() - started < 0.3


@pytest.mark.parametrize("ending", ["jpg", "png", "gif", "bmp", "tif"])
def test_half_a_file_is_truncated(tmp_path, ending):
    path = saved(tmp_path, f"a.{ending}")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert refused(path).reason == "is truncated"


@pytest.mark.parametrize("ending", ["webp", "jp2"])
def test_half_a_file_of_other_kinds_is_refused_too(tmp_path, ending):
    path = saved(tmp_path, f"a.{ending}")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert refused(path).reason.startswith("can't be decoded (")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gone.jpg", "is not there"),
        ("a.png/b.png", "can't be reached: Not a directory"),
        ("loop.png", "can't be reached: Too many levels of symbolic links"),
        ("x" * 300, "can't be reached: File name too long"),
    ],
)
def test_a_path_that_leads_nowhere_is_not_tried_again(tmp_path, name, reason):
    saved(tmp_path, "a.png")
    (tmp_path / "loop.png").symlink_to("loop.png")
    started = time.perf_counter()
    problem = refused(tmp_path / name)
    assert problem.reason == reason
    assert not problem.transient
    assert time.perf_counter() - started < PAUSE


@needs_proc
def test_a_disk_that_fails_is_told_apart_from_a_damaged_file(tmp_path):
    path = tmp_path / "x.jpg"
    path.symlink_to("/proc/self/mem")
    problem = refused(path)
    assert problem.reason == "can't be reached: Input/output error; tried 4 times"
    assert problem.transient


@needs_proc
def test_a_disk_that_is_gone_costs_pauses_for_the_first_few_files_alone(tmp_path):
    lost, good = tmp_path / "a.png", saved(tmp_path, "good.png")
    lost.symlink_to("/proc/self/mem")
    reasons = [refused(lost).reason for _ in range(PATIENCE)]
    assert all(reason.endswith("tried 4 times") for reason in reasons)
    start = time.monotonic()
    assert refused(lost).reason == "can't be reached: Input/output error"
    assert time.monotonic() - start < PAUSE
    RGB.file(str(good))
    assert refused(lost).reason.endswith("tried 4 times")


@needs_proc
def test_a_file_that_comes_back_while_it_is_tried_again_is_read(tmp_path):
    (tmp_path / "a.png").symlink_to("/proc/self/mem")
    saved(tmp_path, "hidden.png")
    timer = threading.Timer(0.1, (tmp_path / "hidden.png").replace, [tmp_path / "a.png"])
    timer.start()
    assert RGB.file(str(tmp_path / "a.png")).shape == (64, 64, 3)
    timer.join()


def test_folders_pipes_sockets_and_devices_are_no_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # paths of sockets are short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.jpg")
    (tmp_path / "folder.jpg").mkdir()
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "device.jpg").symlink_to("/dev/zero")
    for name in ("folder", "pipe", "socket", "device"):
        assert refused(tmp_path / f"{name}.jpg").reason == f"is a {name}, not a file"
        assert RGB.size(str(tmp_path / f"{name}.jpg")) is None


def test_names_of_any_bytes_are_reached_and_named(tmp_path):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\n.png")
    try:
        Path(path).write_bytes(b"no image")
    except OSError:
        pytest.skip("the file system takes no such name")
    assert r"\xff\n.png: is no image" in str(refused(path))
    assert refused("a\0b.png").reason == "can't be decoded (embedded null byte)"


def test_nothing_is_logged_or_printed_about_odd_files(tmp_path, capfd, caplog):
    path = str(tmp_path / "a.tif")
    tifffile.imwrite(path, np.zeros((4, 4, 6), np.uint8), photometric="minisblack", planarconfig="contig")
    content = Path(path).read_bytes()
    with caplog.at_level(logging.DEBUG):
        Decoder("unchanged", 6).file(path)
        for cut in range(8, len(content), 7):
            with pytest.raises(UnreadableError):
                RGB.content(content[:cut], "a.tif")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert capfd.readouterr() == ("", "")


def test_damage_in_a_compressed_tiff_is_not_printed(tmp_path, capfd):
    pytest.importorskip("imagecodecs")
    for compression in ("tiff_lzw", "tiff_adobe_deflate"):
        path = tmp_path / "a.tif"
        Image.open(saved(tmp_path, "a.png")).save(path, compression=compression)
        content = bytearray(path.read_bytes())
        content[200:600] = bytes(range(200)) * 2
        with pytest.raises(UnreadableError, match="can't be decoded"):
            RGB.content(bytes(content), "a.tif")
    assert capfd.readouterr() == ("", "")
