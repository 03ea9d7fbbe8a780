import resource
import time

import numpy as np
import pytest
from PIL import Image
from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Resize

from nestling.ssl.views.evaluation import eval_view


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
