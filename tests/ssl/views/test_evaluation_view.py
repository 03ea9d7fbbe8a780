import resource
import time

import numpy as np
import pytest
from PIL import Image
from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Resize

from nestling.ssl.views.evaluation import Centre, eval_view


def picture(height, width):
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize("shape", [(375, 500), (500, 375), (32, 32), (301, 300), (64, 90), (7, 400)])
@pytest.mark.parametrize(("size", "ratio"), [(224, 0.875), (32, 1.0), (32, 0.875), (97, 0.5)])
def test_it_equals_resize_and_center_crop(shape, size, ratio):
    image = picture(*shape)
    resize = Resize(round(size / ratio), InterpolationMode.BICUBIC)
    expected = Compose([resize, CenterCrop(size)])(Image.fromarray(image))
    view = eval_view(image, size, ratio)
    assert view.shape == (3, size, size)
    assert view.dtype == np.uint8
    assert np.abs(view.astype(int) - np.asarray(expected).transpose(2, 0, 1)).max() <= 1


@pytest.mark.parametrize("shape", [(375, 500), (300, 64), (96, 160)])
@pytest.mark.parametrize("size", [(224, 448), (160, 96), (33, 70)])
def test_a_view_that_is_not_square_equals_resize_and_center_crop(shape, size):
    """Resized, its shape kept, until size / crop_ratio is just covered.

    Of a smooth picture, and to a level a pass: Pillow resizes rows or columns first, whichever is cheaper
    for what is kept, and rounds and cuts off in between.
    """
    coarse = Image.fromarray(64 + picture(shape[0] // 8, shape[1] // 8) // 2)
    image, ratio = np.asarray(coarse.resize(shape[::-1], Image.Resampling.BILINEAR)), 0.875
    cover = [round(side / ratio) for side in size]
    if shape[0] * cover[1] <= shape[1] * cover[0]:
        resized = (cover[0], int(cover[0] * shape[1] / shape[0]))
    else:
        resized = (int(cover[1] * shape[0] / shape[1]), cover[1])
    resized = tuple(max(side, least) for side, least in zip(resized, cover, strict=True))
    expected = Compose([Resize(resized, InterpolationMode.BICUBIC), CenterCrop(size)])(Image.fromarray(image))
    view = Centre(size, ratio)(image, 0)
    assert view.shape == (3, *size)
    assert np.abs(view.astype(int) - np.asarray(expected).transpose(2, 0, 1)).max() <= 2


def test_a_square_is_the_same_as_a_side_or_as_height_and_width():
    image = picture(90, 130)
    assert np.array_equal(Centre((64, 64), 0.8)(image, 5), eval_view(image, 64, 0.8))


@pytest.mark.parametrize("shape", [(1, 4000), (4000, 1), (2, 50_000), (1, 1)])
def test_extreme_shapes_cost_no_more_than_others(shape):
    start = time.perf_counter()
    assert eval_view(picture(*shape), 224).shape == (3, 224, 224)
    assert time.perf_counter() - start < 0.5


def test_the_whole_image_is_seen_where_it_already_fits():
    assert np.array_equal(eval_view(picture(32, 32), 32, 1.0), picture(32, 32).transpose(2, 0, 1))


@pytest.mark.parametrize("channels", [1, 2, 4, 5])
@pytest.mark.parametrize("shape", [(60, 90), (7, 40)])
def test_any_number_of_channels_is_seen_as_each_would_be_alone(channels, shape):
    bands = np.random.default_rng(0).integers(0, 256, (*shape, channels), dtype=np.uint8)
    view = eval_view(bands, 32)
    assert view.shape == (channels, 32, 32)
    assert view.flags.c_contiguous
    for channel in range(channels):
        alone = np.repeat(bands[..., channel, None], 3, axis=2)
        assert np.array_equal(view[channel], eval_view(alone, 32)[0])


@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("shape", [(1, 4000), (100_000, 2)])
def test_strips_cost_little_memory_whatever_their_channels(shape, channels):
    strip = np.zeros((*shape, channels), dtype=np.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    eval_view(strip, 224)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB
