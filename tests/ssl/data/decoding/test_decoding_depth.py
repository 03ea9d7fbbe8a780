"""Numbers of more than 8 bits, and arrays in files."""

from pathlib import Path

import numpy as np
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
    ],
)
def test_arrays_that_are_no_images_are_refused(tmp_path, pixels, reason):
    with pytest.raises(UnreadableError, match=reason):
        RGB.file(stored(tmp_path, pixels, "a.npy"))


def test_half_an_array_is_truncated(tmp_path):
    content = Path(stored(tmp_path, np.zeros((50, 50)), "a.npy")).read_bytes()
    with pytest.raises(UnreadableError, match="is truncated"):
        RGB.content(content[:1000], "a.npy")
