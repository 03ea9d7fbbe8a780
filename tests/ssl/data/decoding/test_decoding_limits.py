"""What is refused before it is decoded: by its size, its header or its format."""

import io
import os
import struct
import tracemalloc
import zlib
from contextlib import contextmanager

import numpy as np
import pytest
import tifffile
from PIL import Image

from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.decoding.reach import LARGE
from nestling.ssl.data.failures import UnreadableError
from nestling.ssl.data.sources.folder import LOOKED_FOR

RGB = Decoder()


def refused(path, decoder=RGB):
    with pytest.raises(UnreadableError) as caught:
        decoder.file(str(path))
    return caught.value


@contextmanager
def memory_below(most):
    """Of what is decoded inside; other things take a few bytes."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def saved(folder, name):
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / name)
    return folder / name


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


@pytest.mark.parametrize(
    ("content", "num_bytes", "reason"),
    [
        (huge_png(40_000), LARGE + 1, "has 40000 x 40000"),
        (b"Hello, world", LARGE + 1, "is no image (starts with b'Hello, w')"),
        (b"\x89PNG\r\n\x1a\n", LARGE + 1, "is a PNG file that is damaged"),
        (b"II*\0\x08\0\0\0", LARGE + 1, "is a TIFF file that is damaged"),
        (huge_png(1), 2**40, "has 1,099,511,627,776 bytes, more than the 5,726,623,040 of the largest"),
    ],
    ids=["too many pixels", "text", "half a PNG", "half a TIFF", "too many bytes"],
)
def test_a_large_file_is_refused_before_it_is_read_whole(tmp_path, content, num_bytes, reason):
    path = tmp_path / "a.png"
    path.write_bytes(content)
    os.truncate(path, num_bytes)  # a hole
    with memory_below(LARGE // 8):
        assert refused(path).reason.startswith(reason)


def test_a_large_file_that_tells_its_size_is_read(tmp_path):
    path = tmp_path / "a.bmp"
    saved(tmp_path, "a.bmp")
    os.truncate(path, LARGE + 1)
    assert RGB.file(str(path)).shape == (64, 64, 3)


@pytest.mark.parametrize(("mode", "channels"), [("rgb", 3), ("gray", 1), ("unchanged", 5)])
@pytest.mark.parametrize("planes", ["contig", "separate"])
def test_more_bands_than_the_mode_takes_are_refused_before_they_are_decoded(tmp_path, mode, channels, planes):
    path = tmp_path / "a.tif"
    pixels = np.zeros((500, 64, 64) if planes == "separate" else (64, 64, 500), np.float64)
    tifffile.imwrite(path, pixels, photometric="minisblack", planarconfig=planes, compression="zlib")
    assert path.stat().st_size < 2**20
    RGB.size(str(path))  # what is imported late is no part of what is measured
    with memory_below(2**22):
        problem = refused(path, Decoder(mode, channels))
    assert problem.reason.startswith("has 500 channels, data.")


def test_more_channels_of_an_array_than_the_mode_takes_are_refused_by_the_header(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((64, 64, 500)))
    content = (tmp_path / "a.npy").read_bytes()
    with (
        memory_below(len(content) * 1.5),
        pytest.raises(UnreadableError, match=r"has 500 channels, data\.mode=rgb takes 1 to 4"),
    ):
        RGB.content(content, "a.npy")


@pytest.mark.skipif(np.dtype(np.longdouble).itemsize <= 8, reason="there is no longer type")
def test_numbers_longer_than_eight_bytes_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((4, 4), np.longdouble))
    assert refused(tmp_path / "a.npy").reason.endswith("not real numbers of up to 8 bytes")


@pytest.mark.parametrize("ending", ["eps", "pcx", "sgi", "ico"])
def test_formats_that_are_not_documented_are_no_images(tmp_path, ending):
    path = saved(tmp_path, f"a.{ending}").rename(tmp_path / "a.jpg")
    assert refused(path).reason.startswith("is no image (starts with")
    assert RGB.size(str(path)) is None
    with Image.open(path) as image, pytest.raises(UnreadableError, match="which is not supported"):
        RGB.image(image, "a")


@pytest.mark.parametrize("ending", LOOKED_FOR.split())
def test_each_kind_of_file_that_is_looked_for_is_read(tmp_path, ending):
    if ending not in Image.registered_extensions():
        pytest.skip(f"this Pillow does not write {ending}")
    path = saved(tmp_path, f"a{ending}")
    assert RGB.file(str(path)).shape == (64, 64, 3)
    assert RGB.size(str(path)) == (64, 64)


def test_what_memory_cannot_hold_is_refused():
    with pytest.raises(UnreadableError, match="needs more memory than there is"):
        Decoder(max_pixels=2**62).content(huge_png(2**31 - 1), "a.png")
