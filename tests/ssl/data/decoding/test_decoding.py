"""Images of 8 bits: modes, transparency, orientation, inks."""

import pickle
import threading
import warnings

import numpy as np
import pytest
from PIL import Image, ImageOps

from nestling.ssl.config import Data
from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.failures import UnreadableError

RGB, GRAY = Decoder(), Decoder("gray", 1)


@pytest.fixture
def saved(tmp_path):
    def save(image, name, **options):
        path = tmp_path / name
        image.save(path, **options)
        return str(path)

    return save


def noise(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def unchanged(channels, **settings):
    return Decoder("unchanged", channels, **settings)


def test_plain_rgb_comes_back_as_written_and_writable(saved):
    decoded = RGB.file(saved(Image.fromarray(noise(5, 7, 3)), "a.png"))
    assert decoded.dtype == np.uint8
    assert decoded.flags.writeable
    assert decoded.flags.c_contiguous
    assert np.array_equal(decoded, noise(5, 7, 3))


def test_content_decodes_as_its_file(saved):
    path = saved(Image.fromarray(noise(5, 7, 3)), "a.webp")
    with open(path, "rb") as file:
        assert np.array_equal(RGB.content(file.read(), "member.webp"), RGB.file(path))


def test_an_opened_image_decodes_as_its_file(saved):
    path = saved(Image.fromarray(noise(5, 7, 4)), "a.png")
    with Image.open(path) as image:
        assert np.array_equal(RGB.image(image, "a"), RGB.file(path))


def test_gray_and_one_bit_images_fill_three_channels(saved):
    gray = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20
    assert np.array_equal(RGB.file(saved(Image.fromarray(gray), "a.png")), np.stack([gray] * 3, axis=-1))
    bits = Image.fromarray(gray > 100)
    assert np.array_equal(RGB.file(saved(bits, "b.png"))[..., 1], (gray > 100) * 255)


def test_gray_mode_gives_the_luma_of_every_kind_of_image(saved):
    pixels = noise(5, 7, 3)
    luma = (pixels @ [0.299, 0.587, 0.114])[:, :, None]
    decoded = GRAY.file(saved(Image.fromarray(pixels), "a.png"))
    assert decoded.shape == (5, 7, 1)
    assert np.abs(decoded - luma).max() <= 0.51
    assert np.array_equal(GRAY.file(saved(Image.fromarray(pixels[..., 0]), "b.png"))[..., 0], pixels[..., 0])
    hidden = Image.new("RGBA", (1, 1), (0, 0, 0, 0))
    assert Decoder("gray", 1, background=(255, 0, 0)).file(saved(hidden, "c.png")).item() == 76


@pytest.mark.parametrize(
    ("mode", "channels", "ending"),
    [
        ("L", 1, "png"),
        ("1", 1, "png"),
        ("LA", 2, "png"),
        ("RGB", 3, "png"),
        ("RGBA", 4, "png"),
        ("CMYK", 4, "tif"),
    ],
)
def test_unchanged_gives_the_channels_as_stored(saved, mode, channels, ending):
    image = Image.fromarray(noise(5, 7, 4), "RGBA").convert("RGB").convert(mode)
    decoded = unchanged(channels).file(saved(image, f"a.{ending}"))
    stored = np.asarray(image.convert("L") if mode == "1" else image).reshape(5, 7, channels)
    assert np.array_equal(decoded, stored)


def test_unchanged_gives_a_palette_as_its_colours(saved):
    image = Image.fromarray(noise(4, 4, 3)).quantize(16)
    colors = np.asarray(image.convert("RGB"))
    assert np.array_equal(unchanged(3).file(saved(image, "a.png")), colors)
    seen = unchanged(4).file(saved(image, "b.png", transparency=bytes([7] * 16)))
    assert np.array_equal(seen[..., :3], colors)
    assert (seen[..., 3] == 7).all()


def test_unchanged_refuses_other_channels_than_configured(saved):
    path = saved(Image.fromarray(noise(4, 4, 4)), "a.png")
    with pytest.raises(UnreadableError, match=r"a\.png: has 4 channels, data\.in_chans=3 expects 3$"):
        unchanged(3).file(path)


@pytest.mark.parametrize("ending", ["png", "jpg", "tif", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_tags_are_applied_or_left_alone_as_configured(saved, ending, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    smooth = Image.fromarray(noise(2, 3, 3)).resize((24, 16), Image.Resampling.NEAREST)
    options = {"lossless": True} if ending == "webp" else {}
    path = saved(smooth, f"a.{ending}", exif=exif, **options)
    smooth.getexif()[0x0112] = orientation
    upright = np.asarray(ImageOps.exif_transpose(smooth))
    for mode, decoder in (("rgb", Decoder), ("unchanged", unchanged)):
        keywords = {} if mode == "rgb" else {"channels": 3}
        for applied, expected in ((True, upright), (False, np.asarray(smooth))):
            decoded = decoder(orientation=applied, **keywords).file(path)
            assert decoded.shape == expected.shape
            assert np.abs(decoded.astype(int) - expected).mean() < 8  # JPEG's losses


def test_a_broken_orientation_tag_leaves_the_image_readable(saved):
    path = saved(Image.fromarray(noise(8, 8, 3)), "a.jpg", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert RGB.file(path).shape == (8, 8, 3)


def test_transparent_pixels_show_the_background_in_every_mode_that_has_them(saved):
    magenta = Image.new("RGBA", (2, 1), (255, 0, 255, 255))
    magenta.putpixel((1, 0), (255, 0, 255, 0))
    decoder = Decoder(background=(1, 2, 3))
    expected = np.array([[[255, 0, 255], [1, 2, 3]]], dtype=np.uint8)
    assert np.array_equal(decoder.file(saved(magenta, "rgba.png")), expected)

    palette = Image.new("P", (2, 1))
    palette.putpalette([255, 0, 255, 0, 0, 0])
    palette.putpixel((1, 0), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(decoder.file(saved(palette, "p.png", transparency=b"\xff\x00")), expected)
        assert np.array_equal(decoder.file(saved(palette, "p.gif", transparency=1)), expected)

    gray = Image.new("LA", (2, 1), (90, 255))
    gray.putpixel((1, 0), (90, 0))
    assert decoder.file(saved(gray, "la.png"))[0].tolist() == [[90] * 3, [1, 2, 3]]


def test_one_colour_declared_transparent_shows_the_background(saved):
    two = np.array([[[9, 9, 9], [200, 0, 0]]], dtype=np.uint8)
    path = saved(Image.fromarray(two), "rgb.png", transparency=(200, 0, 0))
    assert RGB.file(path)[0].tolist() == [[9, 9, 9], [255, 255, 255]]
    deep = np.array([[257 * 9, 257 * 40]], dtype=np.uint16)
    path = saved(Image.fromarray(deep), "deep.png", transparency=257 * 40)
    assert RGB.file(path)[0, :, 1].tolist() == [9, 255]


def test_half_transparent_black_is_gray(saved):
    assert RGB.file(saved(Image.new("RGBA", (1, 1), (0, 0, 0, 128)), "a.png"))[0, 0].tolist() == [127] * 3


def test_cmyk_red_is_red(saved):
    for name in ("a.jpg", "a.tif"):
        red = RGB.file(saved(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), name))
        assert np.abs(red.astype(int) - [255, 0, 0]).max() <= 3


def as_ycck(path):
    """The content of a CMYK JPEG whose Adobe marker says YCCK instead."""
    with open(path, "rb") as file:
        content = bytearray(file.read())
    content[content.index(b"Adobe") + 11] = 2
    return bytes(content)


def test_ycck_equals_the_formula_of_its_definition(saved):
    """Y, Cb and Cr stand for inks; Adobe stores all four planes inverted."""
    y, cb, cr, k = 90, 140, 150, 200  # as stored
    path = saved(Image.new("CMYK", (8, 8), (255 - y, 255 - cb, 255 - cr, 255 - k)), "a.jpg", quality=100)
    paper = 255 - np.array(
        [
            y + 1.402 * (cr - 128),
            y - 0.344136 * (cb - 128) - 0.714136 * (cr - 128),
            y + 1.772 * (cb - 128),
        ]
    )
    decoded = RGB.content(as_ycck(path), "a.jpg")
    assert np.abs(decoded - paper * k / 255).max() <= 2


def test_inks_of_jpegs_equal_another_decoder(saved):
    codecs = pytest.importorskip("imagecodecs")
    smooth = Image.frombytes("CMYK", (3, 3), noise(3, 3, 4).tobytes()).resize((24, 24))
    path = saved(smooth, "a.jpg", quality=95)
    with open(path, "rb") as file:
        plain = file.read()
    for content in (plain, as_ycck(path)):
        inks = 255 - codecs.jpeg8_decode(content, outcolorspace="CMYK")  # which leaves them inverted
        assert np.abs(unchanged(4).content(content, "a").astype(int) - inks).max() <= 1


def test_of_an_animation_the_first_frame_counts(saved):
    frames = [Image.new("RGB", (4, 4), color) for color in ((255, 0, 0), (0, 0, 255))]
    for name in ("a.gif", "a.webp", "a.png"):
        path = saved(frames[0], name, save_all=True, append_images=frames[1:], duration=100)
        assert np.abs(RGB.file(path)[0, 0].astype(int) - [255, 0, 0]).max() <= 2


@pytest.mark.parametrize("ending", ["png", "jpg", "gif", "bmp", "tif", "webp"])
def test_sizes_come_from_headers_of_files_and_contents(saved, ending):
    path = saved(Image.fromarray(noise(20, 30, 3)), f"a.{ending}")
    assert RGB.size(path) == (20, 30)
    with open(path, "rb") as file:
        assert RGB.content_size(file.read()) == (20, 30)


def test_decoders_are_configured_pickled_and_compared(saved):
    data = Data(mode="gray", background=[1, 2, 3], orientation=False, window=[0.0, 4.0], max_pixels=9)
    decoder = Decoder.of(data)
    assert decoder == Decoder("gray", 1, (1, 2, 3), False, (0.0, 4.0), 9)
    assert pickle.loads(pickle.dumps(decoder)) == decoder


def test_arrays_pass_or_are_converted():
    plain = noise(4, 5, 3)
    assert np.array_equal(RGB.array(plain, "a"), plain)
    assert np.array_equal(RGB.array(plain[..., 0], "a"), np.stack([plain[..., 0]] * 3, axis=-1))
    assert np.array_equal(GRAY.array(plain[..., :1], "a"), plain[..., :1])
    assert np.array_equal(unchanged(5).array(noise(4, 6, 5), "a"), noise(4, 6, 5))
    frozen = plain.copy()
    frozen.flags.writeable = False
    assert RGB.array(frozen, "a").flags.writeable
    with pytest.raises(UnreadableError, match="x: has 2 channels that are not said to be colours"):
        RGB.array(noise(5, 6, 2), "x")


def test_pillows_limit_is_as_before_after_threads_have_decoded(saved):
    path = saved(Image.fromarray(noise(64, 64, 3)), "a.png")
    before = Image.MAX_IMAGE_PIXELS
    threads = [threading.Thread(target=lambda: [RGB.file(path) for _ in range(20)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert before == Image.MAX_IMAGE_PIXELS
    assert before


def test_filters_of_warnings_are_set_once_not_for_every_image(saved):
    path = saved(Image.fromarray(noise(4, 4, 3)), "a.png")
    RGB.file(path)
    before = list(warnings.filters)
    RGB.file(path)
    assert all(one is other for one, other in zip(warnings.filters, before, strict=True))
