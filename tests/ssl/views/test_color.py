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


def bands(channels, seed=0):
    return np.random.default_rng(seed).uniform(0, 255, (channels, 12, 12)).astype(np.float32)


@pytest.mark.parametrize("factor", [0.0, 0.6, 1.4])
def test_one_channel_changes_as_torchvision_changes_gray(factor):
    gray = torch.from_numpy(bands(1)) / 255
    for ours, theirs in (
        (color.adjust_brightness, tv.adjust_brightness),
        (color.adjust_contrast, tv.adjust_contrast),
    ):
        assert np.abs(ours(bands(1), factor) - theirs(gray, factor).numpy() * 255).max() < 1e-2
    assert np.array_equal(color.adjust_saturation(bands(1), factor), bands(1))
    assert np.array_equal(color.to_gray(bands(1)), bands(1)[0])


@pytest.mark.parametrize("channels", [1, 2, 4, 5])
def test_other_than_three_channels_have_no_hue(channels):
    assert np.array_equal(color.shift_hue(bands(channels), 0.1), bands(channels))


@pytest.mark.parametrize("factor", [0.0, 0.6, 1.4])
def test_many_channels_follow_their_definitions(factor):
    x = bands(5).astype(np.float64)
    own, between = x.mean(axis=(1, 2), keepdims=True), x.mean(axis=0)
    expected = (
        (color.adjust_brightness, factor * x),
        (color.adjust_contrast, factor * x + (1 - factor) * own),
        (color.adjust_saturation, factor * x + (1 - factor) * between),
    )
    for operation, wanted in expected:
        assert np.abs(operation(bands(5), factor) - wanted.clip(0, 255)).max() < 1e-2
    assert np.abs(color.to_gray(bands(5)) - between).max() < 1e-3


def test_jitter_of_many_channels_keeps_their_number_and_range():
    drawn = Jitter((3, 0, 1, 2), brightness=1.4, contrast=1.4, saturation=1.2, hue=0.1)
    for channels in (1, 2, 5):
        planes = color.jitter(bands(channels), drawn)
        assert planes.shape == (channels, 12, 12)
        assert planes.min() >= 0
        assert planes.max() <= 255
