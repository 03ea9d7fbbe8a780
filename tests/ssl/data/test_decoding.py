import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nestling.ssl.data.decoding import decode, to_eight_bits
from nestling.ssl.errors import UserError


@pytest.fixture
def saved(tmp_path):
    def save(image, name, **options):
        path = tmp_path / name
        image.save(path, **options)
        return str(path)

    return save


def test_plain_rgb_comes_back_as_written_and_writable(saved):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    decoded = decode(saved(Image.fromarray(pixels), "a.png"))
    assert decoded.dtype == np.uint8
    assert decoded.flags.writeable
    assert np.array_equal(decoded, pixels)


def test_gray_and_one_bit_images_fill_three_channels(saved):
    gray = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20
    assert np.array_equal(decode(saved(Image.fromarray(gray), "a.png")), np.stack([gray] * 3, axis=-1))
    bits = Image.fromarray(gray > 100)
    assert np.array_equal(decode(saved(bits, "b.png"))[..., 1], (gray > 100) * 255)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_tags_are_applied(saved, orientation):
    upright = np.zeros((4, 6, 3), dtype=np.uint8)
    upright[0, 0], upright[0, -1], upright[-1, 0] = 255, 160, 80
    undo = {  # how a camera would have stored the upright picture
        1: lambda x: x,
        2: lambda x: x[:, ::-1],
        3: lambda x: x[::-1, ::-1],
        4: lambda x: x[::-1],
        5: lambda x: x.swapaxes(0, 1),
        6: lambda x: np.rot90(x, 1),
        7: lambda x: x[::-1, ::-1].swapaxes(0, 1),
        8: lambda x: np.rot90(x, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = Image.fromarray(np.ascontiguousarray(undo(upright)))
    assert np.array_equal(decode(saved(stored, "a.png", exif=exif)), upright)


def test_transparent_pixels_show_white_in_every_mode_that_has_them(saved):
    magenta = Image.new("RGBA", (2, 1), (255, 0, 255, 255))
    magenta.putpixel((1, 0), (255, 0, 255, 0))
    expected = np.array([[[255, 0, 255], [255, 255, 255]]], dtype=np.uint8)
    assert np.array_equal(decode(saved(magenta, "rgba.png")), expected)

    palette = Image.new("P", (2, 1))
    palette.putpalette([255, 0, 255, 0, 0, 0])
    palette.putpixel((1, 0), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(decode(saved(palette, "p.png", transparency=b"\xff\x00")), expected)
        assert np.array_equal(decode(saved(palette, "p.gif", transparency=1)), expected)

    gray = Image.new("LA", (2, 1), (90, 255))
    gray.putpixel((1, 0), (90, 0))
    assert decode(saved(gray, "la.png"))[0].tolist() == [[90] * 3, [255] * 3]


def test_half_transparent_black_is_gray(saved):
    assert decode(saved(Image.new("RGBA", (1, 1), (0, 0, 0, 128)), "a.png"))[0, 0].tolist() == [127] * 3


def test_cmyk_red_is_red(saved):
    for name in ("a.jpg", "a.tif"):
        red = decode(saved(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), name))
        assert np.abs(red.astype(int) - [255, 0, 0]).max() <= 3


def test_sixteen_bits_are_scaled_not_clipped(saved):
    ramp = np.linspace(0, 65535, 256).round().astype(np.uint16)[None]
    for name in ("a.png", "a.tif"):
        decoded = decode(saved(Image.fromarray(ramp), name))
        assert np.array_equal(decoded[0, :, 0], np.arange(256))
    dim = np.full((2, 2), 20000, dtype=np.uint16)
    assert (decode(saved(Image.fromarray(dim), "dim.png")) == round(20000 / 257)).all()


def test_floats_are_scaled_from_the_unit_interval_or_from_their_own_range(saved):
    unit = np.array([[0.0, 0.5, 0.8]], dtype=np.float32)
    assert decode(saved(Image.fromarray(unit), "a.tif"))[0, :, 0].tolist() == [0, 128, 204]
    wide = np.array([[-100.0, -60.0, 100.0]], dtype=np.float32)
    assert decode(saved(Image.fromarray(wide), "b.tif"))[0, :, 2].tolist() == [0, 51, 255]
    assert to_eight_bits(np.array([[0, 2**20]], dtype=np.int32)).tolist() == [[0, 255]]
    assert (to_eight_bits(np.full((2, 2), 7.0)) == 0).all()


@pytest.mark.parametrize("content", [b"", b"no image", b"\x89PNG\r\n\x1a\n\x00\x00"])
def test_what_is_no_image_is_refused_by_its_path(tmp_path, content):
    path = tmp_path / "broken.png"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"broken\.png can't be read as an image \(\S"):
        decode(str(path))


def test_half_a_jpeg_a_missing_file_and_nan_are_refused(saved, tmp_path):
    path = saved(
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)), "a.jpg"
    )
    content = Path(path).read_bytes()
    (tmp_path / "half.jpg").write_bytes(content[: len(content) // 2])
    Image.fromarray(np.array([[np.nan]], dtype=np.float32)).save(tmp_path / "nan.tif")
    for name in ("half.jpg", "gone.jpg", "nan.tif"):
        with pytest.raises(UserError, match=name):
            decode(str(tmp_path / name))
