"""Numbers of more than 8 bits, and arrays in files."""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import PIL
import pytest
from PIL import Image

from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.decoding.depth import to_eight_bits
from nestling.ssl.data.failures import UnreadableError

RGB = Decoder()


def stored(tmp_path, pixels, name):
    path = tmp_path / name
    if name.endswith(".npy"):
        np.save(path, pixels)
    else:
        Image.fromarray(pixels).save(path)
    return str(path)


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.npy"])
def test_sixteen_bits_are_scaled_not_clipped(tmp_path, name):
    ramp = np.linspace(0, 65535, 256).round().astype(np.uint16)[None]
    assert np.array_equal(RGB.file(stored(tmp_path, ramp, name))[0, :, 0], np.arange(256))
    dim = np.full((2, 2), 20000, dtype=np.uint16)
    assert (RGB.file(stored(tmp_path, dim, f"dim_{name}")) == round(20000 / 257)).all()


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_floats_are_scaled_from_the_unit_interval_or_from_their_own_range(tmp_path, kind):
    unit = np.array([[0.0, 0.5, 0.8]], dtype=kind)
    assert RGB.file(stored(tmp_path, unit, "a.npy"))[0, :, 0].tolist() == [0, 128, 204]
    wide = np.array([[-100.0, -60.0, 100.0]], dtype=kind)
    assert RGB.file(stored(tmp_path, wide, "b.npy"))[0, :, 2].tolist() == [0, 51, 255]
    assert (to_eight_bits(np.full((2, 2), 7.0)) == 0).all()


def test_a_float_tiff_is_scaled_too(tmp_path):
    unit = np.array([[0.0, 0.5, 0.8]], dtype=np.float32)
    assert RGB.file(stored(tmp_path, unit, "a.tif"))[0, :, 0].tolist() == [0, 128, 204]


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        (np.bool_, [False, True, True], [0, 255, 255]),
        (np.uint8, [0, 7, 255], [0, 7, 255]),
        (np.int8, [-128, 0, 127], [0, 128, 255]),
        (np.int16, [-32768, 0, 32767], [0, 128, 255]),
        (np.int32, [0, 7, 255], [0, 7, 255]),
        (np.int64, [3, 7, 200], [3, 7, 200]),
        (np.uint64, [0, 7, 256], [0, 0, 1]),
        (np.int32, [0, 257, 65535], [0, 1, 255]),
        (np.int32, [-10, 0, 2**20], [0, 0, 255]),
        (np.uint32, [0, 257, 65535], [0, 1, 255]),
        (np.uint32, [2**31, 2**31 + 1, 2**32 - 1], [0, 0, 255]),
        (">u2", [0, 257, 65535], [0, 1, 255]),
        (np.float16, [0, 0.5, 1], [0, 128, 255]),
    ],
)
def test_each_type_has_its_range(kind, values, expected):
    assert to_eight_bits(np.array([values], dtype=kind)).tolist() == [expected]


@pytest.mark.parametrize("kind", [np.uint16, np.int16, np.int32, np.uint32, np.float32, np.float64])
def test_a_window_becomes_black_to_white_and_clamps_what_is_outside(kind):
    values = np.array([[0, 100, 160, 200, 3000]], dtype=kind)
    assert to_eight_bits(values, (100.0, 200.0)).tolist() == [[0, 0, 153, 255, 255]]


def test_a_window_is_not_for_images_of_eight_bits(tmp_path):
    gray = np.arange(200, dtype=np.uint8).reshape(10, 20)
    decoded = Decoder(window=(10.0, 20.0)).file(stored(tmp_path, gray, "a.png"))
    assert np.array_equal(decoded[..., 0], gray)


@pytest.mark.parametrize("bits", [4, 6, 10, 12, 14])
def test_the_range_that_a_file_declares_becomes_black_to_white(bits):
    values = np.array([0, 1, 2**bits // 2, 2**bits - 1], np.uint8 if bits < 8 else np.uint16)
    expected = np.round(values / (2**bits - 1) * 255).tolist()
    assert to_eight_bits(values, largest=2**bits - 1).tolist() == expected
    assert to_eight_bits(values, (0.0, 1.0), 2**bits - 1).tolist() == [0, 255, 255, 255]


def png(pixels):
    """Colours of 16 bits, which Pillow can't write."""
    return pytest.importorskip("imagecodecs").png_encode(pixels)


def deep_colors(channels):
    return np.random.default_rng(0).integers(0, 65536, (6, 5, channels), dtype=np.uint16)


def test_sixteen_bit_colours_of_a_png_are_scaled():
    colors = deep_colors(3)
    assert np.abs(RGB.content(png(colors), "a").astype(int) - colors / 257).max() <= 1


def test_a_window_sees_all_sixteen_bits_of_colours_and_leaves_opacity_alone():
    colors = deep_colors(4) // 64
    colors[..., 3] = 30000
    decoded = Decoder("unchanged", 4, window=(0.0, 1023.0)).content(png(colors), "a")
    assert np.abs(decoded[..., :3] - colors[..., :3] / 1023 * 255).max() <= 0.51
    assert (decoded[..., 3] == round(30000 / 257)).all()


def test_gray_with_opacity_of_sixteen_bits_has_two_channels():
    pixels = deep_colors(2)
    decoded = Decoder("unchanged", 2).content(png(pixels), "a")
    assert np.abs(decoded.astype(int) - pixels / 257).max() <= 1


def test_dark_images_of_sixteen_bits_stay_dark_in_every_format(tmp_path):
    dim = np.full((2, 3), 200, np.uint16)
    dark = Image.fromarray(dim)
    for name in ("a.png", "a.tif", "a.pgm", "a.jp2"):
        (dark.convert("I") if name == "a.pgm" else dark).save(tmp_path / name)
        assert (RGB.file(str(tmp_path / name)) == 1).all(), name


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def with_transparent_colour(pixels, colour):
    """The same PNG, in which pixels of one colour are declared transparent."""
    content = png(pixels)
    level = np.array(colour, ">u2").tobytes()
    return content[:33] + chunk(b"tRNS", level) + content[33:]


@pytest.mark.parametrize("window", [None, (0.0, 65535.0)])
def test_a_transparent_colour_of_sixteen_bits_is_laid_over_the_background(window):
    colors = np.array([[[0x1234, 0x5678, 0x9ABC], [0x1235, 0x5678, 0x9ABC]]], np.uint16)
    content = with_transparent_colour(colors, colors[0, 0])
    decoded = Decoder(background=(1, 2, 3), window=window).content(content, "a")
    assert decoded[0, 0].tolist() == [1, 2, 3]
    assert np.abs(decoded[0, 1] - colors[0, 1] / 257).max() <= 1
    stored = Decoder("unchanged", 3, window=window).content(content, "a")
    assert np.abs(stored - colors / 257).max() <= 1


def pnm(magic, pixels, largest):
    height, width = pixels.shape[:2]
    return f"{magic} # a comment\n{width} {height}\n{largest}\n".encode() + pixels.astype(">u2").tobytes()


@pytest.mark.parametrize(("magic", "channels"), [("P5", 1), ("P6", 3)])
@pytest.mark.parametrize("largest", [1023, 4095, 65535])
def test_a_window_sees_the_numbers_of_pgm_and_ppm_files(magic, channels, largest):
    pixels = deep_colors(channels) & largest
    window = (100.0, largest / 2)
    decoded = Decoder("unchanged", channels, window=window).content(pnm(magic, pixels, largest), "a")
    assert np.array_equal(decoded, to_eight_bits(pixels, window))
    plain = Decoder("unchanged", channels).content(pnm(magic, pixels, largest), "a")
    assert np.abs(plain - pixels / largest * 255).max() <= 1


def test_a_window_is_refused_for_a_deep_pgm_as_text_or_from_a_data_set():
    decoder = Decoder(window=(0.0, 4095.0))
    reason = r"data\.window can't be applied to a PGM"
    with pytest.raises(UnreadableError, match=reason):
        decoder.content(b"P2 2 1 4095\n100 4095\n", "a.pgm")
    with (
        Image.open(io.BytesIO(pnm("P5", deep_colors(1) % 4096, 4095))) as image,
        pytest.raises(UnreadableError, match=reason),
    ):
        decoder.image(image, "a")
    assert Decoder("gray", 1, window=(0.0, 9.0)).content(b"P2 2 1 255\n7 255\n", "a.pgm").tolist() == [
        [[7], [255]]
    ]


@pytest.mark.skipif(int(PIL.__version__.split(".")[0]) < 11, reason="older Pillow reads no PFM")
def test_floats_of_a_pfm_file_are_scaled_with_and_without_a_window():
    content = b"Pf\n3 1\n-1.0\n" + np.array([0, 0.5, 1], "<f4").tobytes()
    assert Decoder("gray", 1).content(content, "a").ravel().tolist() == [0, 128, 255]
    assert Decoder("gray", 1, window=(0.0, 0.5)).content(content, "a").ravel().tolist() == [0, 255, 255]


@pytest.mark.parametrize(("channels", "bits"), [(1, 12), (3, 12), (3, 16)])
def test_a_window_is_refused_for_jpeg_2000_whose_numbers_pillow_changes(channels, bits):
    pixels = np.tile(deep_colors(channels) >> (16 - bits), (4, 4, 1)).squeeze()
    content = pytest.importorskip("imagecodecs").jpeg2k_encode(pixels, bitspersample=bits, reversible=True)
    with pytest.raises(UnreadableError, match=f"can't be applied to JPEG 2000 of {bits} bits"):
        Decoder(window=(0.0, 4095.0)).content(content, "a.jp2")
    assert RGB.content(content, "a.jp2").shape == (24, 20, 3)


def test_a_window_is_applied_to_gray_jpeg_2000_of_sixteen_bits_and_not_of_eight(tmp_path):
    pixels = np.tile(deep_colors(1)[..., 0], (4, 4))
    decoder = Decoder("gray", 1, window=(100.0, 30000.0))
    for kind in (np.uint16, np.uint8):
        path = stored(tmp_path, pixels.astype(kind), "a.jp2")
        expected = to_eight_bits(pixels.astype(kind), decoder.window)
        assert np.array_equal(decoder.file(path)[..., 0], expected)


@pytest.mark.parametrize("name", ["a.tif", "a.npy"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(tmp_path, name, bad):
    path = stored(tmp_path, np.array([[0.5, bad]], dtype=np.float32), name)
    with pytest.raises(UnreadableError, match="holds values that are not finite"):
        RGB.file(path)


@pytest.mark.parametrize(
    ("decoder", "shape", "expected"),
    [
        (RGB, (6, 7), (6, 7, 3)),
        (RGB, (6, 7, 1), (6, 7, 3)),
        (RGB, (6, 7, 4), (6, 7, 3)),
        (RGB, (3, 6, 7), (6, 7, 3)),
        (RGB, (3, 6, 3), (3, 6, 3)),  # both would fit: channels last
        (Decoder("unchanged", 5), (5, 6, 7), (6, 7, 5)),
        (Decoder("unchanged", 5), (5, 6, 5), (5, 6, 5)),
        (Decoder("unchanged", 1), (6, 7), (6, 7, 1)),
    ],
)
def test_arrays_in_files_may_have_channels_last_or_first(tmp_path, decoder, shape, expected):
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    path = stored(tmp_path, pixels, "a.npy")
    decoded = decoder.file(path)
    assert decoded.shape == expected
    assert decoder.size(path) == expected[:2]
    if decoder.mode == "unchanged" and len(shape) == 3 and shape != expected:
        assert np.array_equal(decoded, pixels.transpose(1, 2, 0))


@pytest.mark.parametrize(
    ("pixels", "reason"),
    [
        (np.array([[{}]], dtype=object), "holds Python objects, not numbers"),
        (np.zeros(5), r"has the shape \(5,\)"),
        (np.zeros((2, 0, 3)), r"has the shape \(2, 0, 3\)"),
        (np.zeros((2, 2), dtype=complex), "holds complex128, not real numbers"),
        (np.array([["a"]]), "holds <U1, not real numbers"),
        (np.zeros((7, 5, 9), dtype=np.uint8), "has 9 channels, data.mode=rgb takes 1 to 4"),
        (
            np.zeros((8, 64, 64), dtype=np.uint8),
            r"has 8 channels, .* set data.mode=unchanged data.in_chans=8$",
        ),
    ],
)
def test_arrays_that_are_no_images_are_refused(tmp_path, pixels, reason):
    with pytest.raises(UnreadableError, match=reason):
        RGB.file(stored(tmp_path, pixels, "a.npy"))


def test_half_an_array_is_truncated(tmp_path):
    content = Path(stored(tmp_path, np.zeros((50, 50)), "a.npy")).read_bytes()
    with pytest.raises(UnreadableError, match="is truncated"):
        RGB.content(content[:1000], "a.npy")
