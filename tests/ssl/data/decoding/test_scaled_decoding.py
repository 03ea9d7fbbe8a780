"""JPEGs decoded at a fraction of their size, for views that shrink them further."""

import io

import numpy as np
import pytest
from image_folder import texture
from PIL import Image

from nestling.ssl.data.decoding.decoder import Decoder

RGB, GRAY = Decoder(), Decoder("gray", 1)


def picture(height, width):
    """Smooth: what a mean of pixels and a scaled decoding leave alike."""
    coarse = texture(2, 12, np.random.default_rng(0))[: max(2, height // 40), : max(2, width // 40)]
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def content_of(image, kind="JPEG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


class Asked:
    """A reduction that notes what it was asked."""

    def __init__(self, factor):
        self.factor, self.sizes = factor, []

    def __call__(self, height, width):
        self.sizes.append((height, width))
        return self.factor


@pytest.mark.parametrize("factor", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [(320, 400), (321, 399), (327, 393), (8, 9)])
@pytest.mark.parametrize("decoder", [RGB, GRAY])
def test_a_jpeg_becomes_the_means_of_its_pixels(factor, size, decoder):
    content, asked = content_of(picture(*size), quality=95), Asked(factor)
    whole, small = decoder.content(content, "a"), decoder.content(content, "a", asked)
    assert asked.sizes == [size]
    height, width = (-(-side // factor) for side in size)
    assert small.shape == (height, width, whole.shape[2])
    assert small.flags.c_contiguous
    inner = whole[: size[0] // factor * factor, : size[1] // factor * factor].astype(float)
    means = inner.reshape(size[0] // factor, factor, size[1] // factor, factor, -1).mean(axis=(1, 3))
    difference = np.abs(small[: size[0] // factor, : size[1] // factor] - means)
    assert difference.mean() < 2


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("upright", [True, False])
def test_a_turned_jpeg_is_asked_for_and_returned_as_it_will_be_seen(orientation, upright):
    exif = Image.Exif()
    exif[0x0112] = orientation
    content, asked = content_of(picture(200, 320), exif=exif, quality=95), Asked(2)
    decoder = Decoder(orientation=upright)
    whole, small = decoder.content(content, "a"), decoder.content(content, "a", asked)
    assert asked.sizes == [whole.shape[:2]]
    assert small.shape == (whole.shape[0] // 2, whole.shape[1] // 2, 3)
    assert np.abs(small - whole[::2, ::2].astype(float)).mean() < 4


@pytest.mark.parametrize("kind", ["progressive", "MPO"])
def test_progressive_files_and_the_first_of_several_pictures_are_reduced_too(kind):
    several = {"save_all": True, "append_images": [picture(100, 100)]}
    options = ("MPO", several) if kind == "MPO" else ("JPEG", {"progressive": True})
    content = content_of(picture(200, 320), options[0], **options[1])
    whole, small = RGB.content(content, "a"), RGB.content(content, "a", Asked(2))
    assert small.shape == (100, 160, 3)
    assert np.abs(small - whole[::2, ::2].astype(float)).mean() < 4


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_inks_and_gray_keep_their_colours(mode):
    content = content_of(picture(200, 320).convert(mode), quality=95)
    whole, small = RGB.content(content, "a"), RGB.content(content, "a", Asked(4))
    assert small.shape == (50, 80, 3)
    assert np.abs(small - whole[::4, ::4].astype(float)).mean() < 6


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "BMP", "GIF", "JPEG2000", "PPM"])
def test_other_formats_are_decoded_whole_and_nobody_is_asked(kind):
    asked = Asked(2)
    assert RGB.content(content_of(picture(80, 120), kind), "a", asked).shape == (80, 120, 3)
    assert asked.sizes == []


def test_files_are_reduced_as_their_content_is(tmp_path):
    picture(160, 240).save(tmp_path / "a.jpg")
    path = str(tmp_path / "a.jpg")
    content = (tmp_path / "a.jpg").read_bytes()
    assert np.array_equal(RGB.file(path, Asked(4)), RGB.content(content, "a", Asked(4)))
    assert RGB.file(path).shape == (160, 240, 3)
