"""Images that can't be used: why, in few words, and whether the disk or the file is to blame."""

import io
import logging
import os
import struct
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.failures import UnreadableError

RGB = Decoder()
needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="there is no /proc/self/mem")


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
    assert not problem.io
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


def test_a_missing_file_is_out_of_reach(tmp_path):
    problem = refused(tmp_path / "gone.jpg")
    assert problem.reason == "can't be reached: No such file or directory; tried 4 times"
    assert problem.io


@needs_proc
def test_a_disk_that_fails_is_told_apart_from_a_damaged_file(tmp_path):
    path = tmp_path / "x.jpg"
    path.symlink_to("/proc/self/mem")
    problem = refused(path)
    assert problem.reason == "can't be reached: Input/output error; tried 4 times"
    assert problem.io


def test_a_file_that_comes_back_while_it_is_tried_again_is_read(tmp_path):
    saved(tmp_path, "hidden.png")
    timer = threading.Timer(0.1, (tmp_path / "hidden.png").rename, [tmp_path / "a.png"])
    timer.start()
    assert RGB.file(str(tmp_path / "a.png")).shape == (64, 64, 3)
    timer.join()


def test_folders_pipes_and_devices_are_no_files(tmp_path):
    (tmp_path / "folder.jpg").mkdir()
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "device.jpg").symlink_to("/dev/zero")
    for name in ("folder", "pipe", "device"):
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


def huge_png(side):
    """The header of a PNG, and nothing else."""
    small = Image.new("L", (1, 1))
    stream = io.BytesIO()
    small.save(stream, "png")
    content = bytearray(stream.getvalue())
    content[16:24] = struct.pack(">II", side, side)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    return bytes(content)


def test_too_many_pixels_are_refused_before_they_are_decoded(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(huge_png(40_000))
    expected = "has 40000 x 40000 = 1,600,000,000 pixels, data.max_pixels allows 178,956,970"
    assert refused(path).reason == expected
    assert RGB.size(str(path)) == (40_000, 40_000)


def test_max_pixels_replaces_pillows_own_limit(tmp_path, monkeypatch):
    path = saved(tmp_path, "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert RGB.file(str(path)).shape == (64, 64, 3)
    assert refused(path, Decoder(max_pixels=4095)).reason.endswith("data.max_pixels allows 4,095")
    assert Decoder(max_pixels=4096).file(str(path)).shape == (64, 64, 3)


def test_a_large_file_is_refused_before_it_is_read_whole(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(huge_png(40_000))
    with open(path, "r+b") as file:
        file.truncate(2**40)  # a hole: no memory could hold it
    assert refused(path).reason.startswith("has 40000 x 40000")


def test_what_memory_cannot_hold_is_refused():
    with pytest.raises(UnreadableError, match="needs more memory than there is"):
        Decoder(max_pixels=2**62).content(huge_png(2**31 - 1), "a.png")


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
