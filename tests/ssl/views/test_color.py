import numpy as np
import pytest
import torch
import torchvision.transforms.functional as tv
from PIL import Image

from nestling.ssl.views import color
from nestling.ssl.views.plan import Jitter


def picture(seed=0, size=24):
    """Noise over smooth colours, with gray, black and white corners."""
    random = np.random.default_rng(seed)
    smooth = np.kron(random.integers(0, 256, (4, 4, 3)), np.ones((size // 4, size // 4, 1)))
    pixels = (smooth + random.normal(0, 20, (size, size, 3))).clip(0, 255).astype(np.uint8)
    pixels[0, :3], pixels[1, :3], pixels[2, :3] = 0, 255, 128
    return pixels


def planes_of(pixels):
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)).astype(np.float32)


def with_pillow(function, pixels, factor):
    return planes_of(np.asarray(function(Image.fromarray(pixels), factor)))


def in_float(function, pixels, factor):
    return function(torch.from_numpy(planes_of(pixels)) / 255, factor).numpy() * 255


OPERATIONS = [
    (color.adjust_brightness, tv.adjust_brightness, [0.0, 0.6, 1.0, 1.4, 2.0]),
    (color.adjust_contrast, tv.adjust_contrast, [0.0, 0.6, 1.0, 1.4, 2.0]),
    (color.adjust_saturation, tv.adjust_saturation, [0.0, 0.8, 1.0, 1.2, 2.0]),
]


@pytest.mark.parametrize(("ours", "theirs", "factors"), OPERATIONS)
def test_each_operation_stays_within_two_levels_of_pillow(ours, theirs, factors):
    for factor in factors:
        mine = ours(planes_of(picture()), factor)
        assert mine.dtype == np.float32
        assert np.abs(mine - with_pillow(theirs, picture(), factor)).max() <= 2


@pytest.mark.parametrize("turns", [-0.5, -0.37, -1 / 6, -0.1, -0.01, 0.0, 0.02, 0.1, 1 / 6, 0.25, 1 / 3, 0.5])
def test_hue_equals_the_way_through_hsv_in_floats(turns):
    for seed in range(3):
        mine = color.shift_hue(planes_of(picture(seed)), turns)
        assert np.abs(mine - in_float(tv.adjust_hue, picture(seed), turns)).max() < 2e-3


@pytest.mark.parametrize("turns", [-0.1, 0.05, 0.1])
def test_hue_is_close_to_pillow_which_rounds_hue_and_saturation(turns):
    difference = np.abs(
        color.shift_hue(planes_of(picture()), turns) - with_pillow(tv.adjust_hue, picture(), turns)
    )
    assert difference.max() <= 12  # as much as the float path of torchvision is away from Pillow
    assert difference.mean() < 1.5


def test_hue_shifts_add_up_and_keep_extremes():
    planes = planes_of(picture())
    twice = color.shift_hue(color.shift_hue(planes.copy(), 0.07), 0.08)
    assert np.abs(twice - color.shift_hue(planes.copy(), 0.15)).max() < 1e-2
    assert np.abs(twice.max(axis=0) - planes.max(axis=0)).max() < 1e-3
    assert np.abs(twice.min(axis=0) - planes.min(axis=0)).max() < 1e-3


def test_gray_is_pillows_luma():
    gray = color.to_gray(planes_of(picture()))
    assert np.abs(gray - np.asarray(Image.fromarray(picture()).convert("L"))).max() <= 0.51


@pytest.mark.parametrize("threshold", [0, 1, 128, 255, 256])
def test_solarize_equals_pillow_exactly(threshold):
    pixels = picture()
    expected = np.asarray(tv.solarize(Image.fromarray(pixels), threshold))
    assert np.array_equal(color.solarize(pixels.copy(), threshold), expected)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2), (2, 0, 3, 1)])
def test_jitter_applies_all_four_in_the_order_drawn(order):
    drawn = Jitter(order, brightness=1.3, contrast=0.7, saturation=1.15, hue=-0.06)
    functions = (tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation, tv.adjust_hue)
    factors = (1.3, 0.7, 1.15, -0.06)
    expected = torch.from_numpy(planes_of(picture())) / 255
    for operation in order:
        expected = functions[operation](expected, factors[operation])
    mine = color.jitter(planes_of(picture()), drawn)
    assert np.abs(mine - expected.numpy() * 255).max() < 0.1
