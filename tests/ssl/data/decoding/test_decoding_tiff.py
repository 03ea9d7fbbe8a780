"""TIFF files of many bands, planes, pages and depths."""

import subprocess
import sys

import numpy as np
import pytest
import tifffile
from PIL import Image

from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.failures import UnreadableError

RGB = Decoder()


@pytest.fixture
def written(tmp_path):
    def write(pixels, **options):
        path = str(tmp_path / "a.tif")
        tifffile.imwrite(path, pixels, **options)
        return path

    return write


def bands(channels, kind=np.uint8):
    random = np.random.default_rng(0)
    if np.dtype(kind).kind == "f":
        return random.random((6, 5, channels)).astype(kind)
    return random.integers(0, np.iinfo(kind).max, (6, 5, channels), dtype=kind, endpoint=True)


def in_eight_bits(pixels):
    scale = 1 if pixels.dtype.kind == "f" else np.iinfo(pixels.dtype).max
    return np.round(pixels.astype(np.float64) / scale * 255)


@pytest.mark.parametrize("planes", ["contig", "separate"])
@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.float32])
@pytest.mark.parametrize("channels", [2, 4, 6, 8])
def test_bands_of_any_depth_come_back_as_channels(written, planes, kind, channels):
    pixels = bands(channels, kind)
    stored = pixels if planes == "contig" else pixels.transpose(2, 0, 1)
    path = written(stored, photometric="minisblack", planarconfig=planes)
    decoder = Decoder("unchanged", channels)
    assert np.array_equal(decoder.file(path), in_eight_bits(pixels))
    assert decoder.size(path) == (6, 5)


@pytest.mark.parametrize("compression", ["zlib", "lzw"])
@pytest.mark.parametrize("tile", [None, (16, 16)])
def test_compressed_and_tiled_bands_are_read(written, compression, tile):
    pytest.importorskip("imagecodecs")
    pixels = np.tile(bands(5, np.uint16), (6, 6, 1))
    path = written(
        pixels, photometric="minisblack", planarconfig="contig", compression=compression, tile=tile
    )
    assert np.array_equal(Decoder("unchanged", 5).file(path), in_eight_bits(pixels))


@pytest.mark.parametrize("planes", ["contig", "separate"])
@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.float32])
def test_three_samples_are_colours(written, planes, kind):
    pixels = bands(3, kind)
    path = written(
        pixels if planes == "contig" else pixels.transpose(2, 0, 1), photometric="rgb", planarconfig=planes
    )
    assert np.array_equal(RGB.file(path), in_eight_bits(pixels))


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_a_fourth_sample_is_opacity_where_the_file_says_so(written, kind):
    pixels = bands(4, kind)
    pixels[..., 3] = 0
    path = written(pixels, photometric="rgb", extrasamples=["unassalpha"])
    assert (RGB.file(path) == 255).all()
    path = written(pixels, photometric="rgb", extrasamples=["unspecified"])
    assert np.array_equal(RGB.file(path), in_eight_bits(pixels[..., :3]))


def test_four_samples_that_nothing_calls_colours_are_refused_in_rgb(written):
    path = written(bands(4), photometric="minisblack", planarconfig="contig")
    with pytest.raises(
        UnreadableError, match=r"has 4 channels that are not said to be colours: set data\.mode="
    ):
        RGB.file(path)


@pytest.mark.parametrize("planes", ["contig", "separate"])
def test_many_bands_are_refused_in_rgb_and_the_message_says_what_reads_them(written, planes):
    pixels = bands(8, np.uint16)
    stored = pixels if planes == "contig" else pixels.transpose(2, 0, 1)
    path = written(stored, photometric="minisblack", planarconfig=planes)
    message = "has 8 channels, data.mode=rgb takes 1 to 4: set data.mode=unchanged data.in_chans=8"
    with pytest.raises(UnreadableError) as refused:
        RGB.file(path)
    assert refused.value.reason == message


def test_other_bands_than_configured_are_refused(written):
    path = written(bands(6), photometric="minisblack", planarconfig="contig")
    with pytest.raises(UnreadableError, match=r"has 6 channels, data\.in_chans=5 expects 5"):
        Decoder("unchanged", 5).file(path)


@pytest.mark.parametrize("kind", [np.int16, np.uint32, np.float64])
def test_single_samples_of_types_that_pillow_lacks_keep_their_values(written, kind):
    pixels = bands(1, kind)[..., 0]
    window = (0.0, float(pixels.max()))
    expected = (pixels.clip(0) / pixels.max().astype(float) * 255).round()
    path = written(pixels, photometric="minisblack")
    assert np.array_equal(Decoder("gray", 1, window=window).file(path)[..., 0], expected)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_zero_is_white_where_the_file_says_so(written, kind):
    pixels = bands(1, kind)[..., 0]
    path = written(pixels, photometric="miniswhite")
    assert np.array_equal(Decoder("gray", 1).file(path)[..., 0], 255 - in_eight_bits(pixels))


@pytest.mark.parametrize("window", [None, (1.0, 9.0)])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("bits", [2, 4, 6, 10, 12, 14])
def test_samples_of_few_bits_are_scaled_by_the_range_that_the_file_declares(written, bits, channels, window):
    pytest.importorskip("imagecodecs")
    pixels = np.random.default_rng(0).integers(0, 2**bits, (6, 8, channels))
    stored = pixels.astype(np.uint8 if bits < 8 else np.uint16).squeeze()
    path = written(stored, bitspersample=bits, photometric="rgb" if channels == 3 else "minisblack")
    low, high = window or (0, 2**bits - 1)
    expected = ((pixels - low) / (high - low) * 255).clip(0, 255).round()
    assert np.array_equal(Decoder("unchanged", channels, window=window).file(path), expected)


@pytest.mark.parametrize("bits", [2, 4, 12])
def test_zero_is_white_in_samples_of_few_bits_too(written, bits):
    pytest.importorskip("imagecodecs")
    pixels = np.random.default_rng(0).integers(0, 2**bits, (6, 8))
    stored = pixels.astype(np.uint8 if bits < 8 else np.uint16)
    path = written(stored, bitspersample=bits, photometric="miniswhite")
    expected = 255 - (pixels / (2**bits - 1) * 255).round()
    for window in (None, (0.0, 2.0**bits - 1)):
        assert np.array_equal(Decoder("gray", 1, window=window).file(path)[..., 0], expected)


@pytest.mark.parametrize("compression", ["zlib", "lzw", "packbits"])
@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA", "P"])
def test_compressed_files_decode_as_plain_ones(written, tmp_path, compression, mode):
    pytest.importorskip("imagecodecs")
    image = Image.fromarray(np.tile(bands(4), (5, 5, 1)), "RGBA").convert("RGB" if mode == "P" else "RGBA")
    image.convert(mode).save(tmp_path / "plain.tif")
    names = {"zlib": "tiff_adobe_deflate", "lzw": "tiff_lzw", "packbits": "packbits"}
    image.convert(mode).save(tmp_path / "packed.tif", compression=names[compression])
    for decoder in (RGB, Decoder("gray", 1), Decoder("unchanged", 3 if mode == "P" else len(mode))):
        plain, packed = (decoder.file(str(tmp_path / f"{name}.tif")) for name in ("plain", "packed"))
        assert np.array_equal(plain, packed)


def test_volumes_are_refused_before_they_are_decoded(written):
    path = written(
        np.zeros((16, 32, 32), np.uint8), volumetric=True, tile=(16, 16, 16), photometric="minisblack"
    )
    with pytest.raises(UnreadableError, match="has the axes ZYX, not height, width and samples"):
        RGB.file(path)


def test_pages_that_are_as_many_as_the_channels_are_their_channels(written):
    pixels = bands(4, np.uint16)
    path = written(pixels.transpose(2, 0, 1), photometric="minisblack", metadata=None)
    with tifffile.TiffFile(path) as file:
        assert len(file.pages) == 4
    assert np.array_equal(Decoder("unchanged", 4).file(path), in_eight_bits(pixels))
    assert np.array_equal(Decoder("gray", 1).file(path), in_eight_bits(pixels[..., :1]))
    with pytest.raises(UnreadableError, match=r"has 1 channel, data\.in_chans=5 expects 5"):
        Decoder("unchanged", 5).file(path)


def test_pages_of_different_sizes_are_no_channels(tmp_path):
    path = str(tmp_path / "a.tif")
    with tifffile.TiffWriter(path) as file:
        for side in (8, 9):
            file.write(np.zeros((side, 8), np.uint8), photometric="minisblack", metadata=None)
    with pytest.raises(UnreadableError, match="has pages of different sizes or types"):
        Decoder("unchanged", 2).file(path)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied_to_bands_as_pillow_applies_it_to_gray(tmp_path, written, orientation):
    tag = [(274, "H", 1, orientation, True)]
    pixels = bands(6)
    path = written(pixels, photometric="minisblack", planarconfig="contig", extratags=tag)
    turned = Decoder("unchanged", 6).file(path)
    assert np.array_equal(Decoder("unchanged", 6, orientation=False).file(path), pixels)
    gray = written(np.ascontiguousarray(pixels[..., 2]), photometric="minisblack", extratags=tag)
    with (
        open(gray, "rb") as stream,
        Image.open(stream) as image,
    ):  # Pillow mixes up rows where it opens the path
        image.load()
        assert np.array_equal(turned[..., 2], np.asarray(image))


@pytest.mark.parametrize("compression", [None, "zlib"])
def test_half_a_file_is_truncated(written, compression):
    pixels = np.tile(bands(8), (20, 20, 1))
    path = written(pixels, photometric="minisblack", planarconfig="contig", compression=compression)
    with open(path, "rb") as file:
        content = file.read()
    with pytest.raises(UnreadableError, match="is truncated"):
        Decoder("unchanged", 8).content(content[: len(content) // 2], "a.tif")


def test_a_large_image_is_refused_by_its_header(written):
    path = written(bands(8), photometric="minisblack", planarconfig="contig")
    with pytest.raises(UnreadableError, match=r"has 5 x 6 = 30 pixels, data\.max_pixels allows 29"):
        Decoder("unchanged", 8, max_pixels=29).file(path)


@pytest.mark.slow
def test_a_compression_that_needs_a_missing_package_names_it(written):
    path = written(bands(8), photometric="minisblack", planarconfig="contig")
    with tifffile.TiffFile(path, mode="r+") as file:
        file.pages.first.tags["Compression"].overwrite(5)
    program = (
        "import sys; sys.modules['imagecodecs'] = None\n"
        "from nestling.ssl.data.decoding.decoder import Decoder\n"
        f"Decoder('unchanged', 8).file({path!r})"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "is compressed by LZW: run `pip install imagecodecs`" in ended.stderr
