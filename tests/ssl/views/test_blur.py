import numpy as np
import pytest
from PIL import Image, ImageFilter

from nestling.ssl.views import blur
from nestling.ssl.views.blur import extended_box, gaussian_blur


def noise(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)


def planes_of(pixels):
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)).astype(np.float32)


@pytest.mark.parametrize("size", [2, 5, 16, 32, 48, 49, 96])
@pytest.mark.parametrize("sigma", [0.1, 0.5, 1.0, 1.41, 1.42, 2.0, 5.0])
def test_blur_stays_within_three_levels_of_pillow(size, sigma):
    """Even on noise, and at the border; Pillow rounds six times, we never."""
    expected = planes_of(np.asarray(Image.fromarray(noise(size)).filter(ImageFilter.GaussianBlur(sigma))))
    difference = np.abs(gaussian_blur(planes_of(noise(size)), sigma) - expected)
    assert difference.max() <= 3
    assert difference.mean() < 1.2


@pytest.mark.parametrize("sigma", [0.3, 1.0, 2.0, 4.0])
def test_the_two_ways_of_blurring_are_one(sigma, monkeypatch):
    planes = planes_of(noise(40))
    small = gaussian_blur(planes.copy(), sigma)
    monkeypatch.setattr(blur, "SMALL", 0)
    assert np.abs(gaussian_blur(planes.copy(), sigma) - small).max() < 1e-2


@pytest.mark.parametrize("sigma", [0.1, 0.7, 1.0, 1.5, 2.0, 6.0])
def test_three_boxes_have_the_variance_of_the_gaussian(sigma):
    reach, edge = extended_box(sigma)
    offsets = np.arange(-reach - 1, reach + 2)
    weights = np.where(np.abs(offsets) <= reach, 1.0, edge) / (2 * (reach + edge) + 1)
    assert 0 <= edge < 1
    assert weights.sum() == pytest.approx(1)
    assert 3 * (weights * offsets**2).sum() == pytest.approx(sigma**2)


@pytest.mark.parametrize("size", [20, 80])
def test_constants_stay_and_the_input_is_not_overwritten(size):
    planes = np.full((3, size, size), 77, dtype=np.float32)
    assert np.allclose(gaussian_blur(planes, 1.3), 77, atol=1e-3)
    before = planes_of(noise(size))
    kept = before.copy()
    gaussian_blur(before, 1.3)
    assert np.array_equal(before, kept)
