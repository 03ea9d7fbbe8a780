from dataclasses import replace

import numpy as np
import pytest
import torch
import torchvision.transforms.functional as tv
from PIL import Image, ImageFilter
from torchvision.transforms import InterpolationMode

from nestling.ssl.config import Views
from nestling.ssl.randomness import Stream, generator
from nestling.ssl.views import render as render_module
from nestling.ssl.views.plan import Jitter, View, draw
from nestling.ssl.views.render import normalize, render

JITTER = Jitter((1, 3, 0, 2), brightness=1.2, contrast=0.8, saturation=1.1, hue=0.05)
PLAIN = View((3, 5, 20, 24), 16, flip=False, jitter=None, grayscale=False, blur=None, solarize=None)


COMPILED = render_module.kernel is not None


@pytest.fixture(autouse=True, params=["compiled", "not compiled"])
def _way(request, monkeypatch):
    """All holds of both ways of rendering."""
    if request.param == "not compiled":
        monkeypatch.setattr(render_module, "kernel", None)
    elif not COMPILED:
        pytest.skip("the kernel is not built: run pip install -e .")


def picture(height, width, seed=0):
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(float)
    return (smooth + random.normal(0, 12, smooth.shape)).clip(0, 255).astype(np.uint8)


def as_published(view, image):
    """The pipeline of torchvision and Pillow, one operation after the other."""
    output = Image.fromarray(image)
    output = tv.resized_crop(output, *view.box, [view.size, view.size], InterpolationMode.BICUBIC)
    if view.flip:
        output = tv.hflip(output)
    if view.jitter:
        functions = (tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation, tv.adjust_hue)
        factors = (view.jitter.brightness, view.jitter.contrast, view.jitter.saturation, view.jitter.hue)
        for operation in view.jitter.order:
            output = functions[operation](output, factors[operation])
    if view.grayscale:
        output = tv.rgb_to_grayscale(output, 3)
    if view.blur is not None:
        output = output.filter(ImageFilter.GaussianBlur(view.blur))
    if view.solarize is not None:
        output = tv.solarize(output, view.solarize)
    return np.asarray(output).transpose(2, 0, 1)


def difference(view, image):
    ours = render(view, image)
    assert ours.shape == (3, view.size, view.size)
    assert ours.dtype == np.uint8
    return np.abs(ours.astype(int) - as_published(view, image))


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize(
    ("box", "size"),
    [
        ((0, 0, 32, 32), 32),
        ((4, 9, 11, 7), 16),
        ((1, 2, 28, 25), 16),
        ((7, 3, 1, 1), 32),
        ((0, 0, 64, 64), 64),
        ((0, 0, 65, 60), 64),
        ((20, 30, 150, 190), 96),
        ((10, 5, 180, 160), 224),
        ((0, 0, 200, 240), 64),
        ((0, 0, 200, 240), 8),
    ],
)
def test_resize_stays_within_two_levels_of_pillow(box, size, flip):
    far = difference(replace(PLAIN, box=box, size=size, flip=flip), picture(200, 240))
    assert far.max() <= 2
    assert far.mean() < 0.3


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((500, 600), 16),
        ((2000, 20), 16),
        ((20, 2000), 16),
        ((8000, 30), 48),
        ((30, 8000), 48),
        ((16000, 16), 96),
    ],
)
def test_much_smaller_views_stay_within_two_levels_of_pillow_and_flat_ones_flat(shape, size):
    """Of less contrast, as Pillow sums the rows of very tall images first, which clips other overshoots."""
    view = replace(PLAIN, box=(0, 0, *shape), size=size)
    far = difference(view, 64 + picture(*shape) // 2)
    assert far.max() <= 2
    assert far.mean() < 0.4
    for level in (0, 1, 100, 171, 254, 255):
        assert (render(view, np.full((*shape, 3), level, np.uint8)) == level).all()


@pytest.mark.parametrize(
    ("changes", "largest", "mean"),
    [
        ({"jitter": JITTER}, 14, 3.5),
        ({"grayscale": True}, 2, 0.7),
        ({"blur": 0.1}, 3, 1),
        ({"blur": 1.5}, 3, 1),
        ({"grayscale": True, "blur": 1.0}, 3, 1),
        ({"jitter": JITTER, "flip": True, "grayscale": True, "blur": 0.8}, 6, 2),
    ],
)
@pytest.mark.parametrize(("box", "size"), [((2, 3, 30, 25), 32), ((10, 20, 150, 160), 96)])
def test_each_step_stays_close_to_the_published_pipeline(changes, largest, mean, box, size):
    far = difference(replace(PLAIN, box=box, size=size, **changes), picture(200, 240))
    assert far.max() <= largest
    assert far.mean() < mean


def test_solarize_inverts_what_reaches_the_threshold():
    image = picture(40, 40)
    plain, solarized = render(PLAIN, image), render(replace(PLAIN, solarize=100), image)
    assert np.array_equal(solarized, np.where(plain >= 100, 255 - plain, plain))


@pytest.mark.parametrize(("shape", "sizes"), [((32, 32), (32, 16)), ((120, 160), (96, 48))])
def test_drawn_views_look_as_the_published_ones_on_average(shape, sizes):
    """Pixels near the solarize threshold may flip, so the mean counts."""
    image = picture(*shape)
    views = [
        view for i in range(20) for view in draw(generator(0, Stream.VIEWS, 0, i), *shape, Views(), *sizes)
    ]
    assert np.mean([difference(view, image).mean() for view in views]) < 2


def test_rendering_is_pure_and_leaves_the_image_alone():
    image = picture(80, 80)
    kept = image.copy()
    for view in draw(generator(0, Stream.VIEWS, 0, 0), 80, 80, Views(), 70, 32):
        assert np.array_equal(render(view, image), render(view, image))
    assert np.array_equal(image, kept)


@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (300, 1), (2, 3)])
def test_tiny_and_narrow_images_render(shape):
    for view in draw(generator(0, Stream.VIEWS, 0, 0), *shape, Views(), 96, 33):
        assert render(view, picture(*shape)).shape == (3, view.size, view.size)


def test_normalize_equals_torchvision():
    images = torch.randint(0, 256, (4, 3, 5, 6), dtype=torch.uint8)
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    expected = tv.normalize(images.float() / 255, mean, std)
    assert torch.allclose(normalize(images, mean, std), expected, atol=1e-5)
    assert images.dtype == torch.uint8


def test_a_gradient_passes_normalize_after_it_was_first_called_in_inference():
    mean, std = [0.25, 0.5, 0.75], [0.125, 0.25, 0.5]  # of no other test
    with torch.inference_mode():
        normalize(torch.zeros(1, 3, 2, 2), mean, std)
    pixels = torch.zeros(1, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    normalize(pixels, mean, std).sum().backward()
    assert torch.allclose(pixels.grad[0, :, 0, 0], 1 / (255 * torch.tensor(std, dtype=torch.float64)))


@pytest.mark.parametrize(
    "out",
    [
        np.empty((3, 16, 32), np.uint8)[..., ::2],
        np.empty((3, 16, 16), np.int8),
        np.empty((1, 3, 16, 16), np.uint8),
        np.empty((4, 16, 16), np.uint8),
    ],
    ids=["strided", "signed", "batch", "channels"],
)
def test_a_place_that_does_not_fit_is_refused(out):
    with pytest.raises(AssertionError):
        render(PLAIN, picture(40, 40), out)


@pytest.mark.parametrize("dtype", [np.int8, np.bool_, np.float32])
def test_an_image_of_another_type_is_refused(dtype):
    with pytest.raises(AssertionError):
        render(PLAIN, picture(40, 40).astype(dtype))


def bands(height, width, channels):
    return np.concatenate([picture(height, width, seed) for seed in range(2)], axis=2)[..., :channels]


@pytest.mark.parametrize("channels", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("shape", "sizes"), [((32, 32), (32, 16)), ((90, 120), (96, 48)), ((1, 300), (70, 33))]
)
def test_views_have_the_channels_of_their_image_and_are_pure(channels, shape, sizes):
    image = bands(*shape, channels)
    kept = image.copy()
    for view in draw(generator(0, Stream.VIEWS, 0, 0), *shape, Views(), *sizes):
        rendered = render(view, image)
        assert rendered.shape == (channels, view.size, view.size)
        assert rendered.dtype == np.uint8
        assert np.array_equal(rendered, render(view, image))
    assert np.array_equal(image, kept)


@pytest.mark.parametrize(
    "changes", [{}, {"blur": 1.2}, {"solarize": 100}, {"flip": True, "blur": 0.4, "solarize": 128}]
)
@pytest.mark.parametrize(("box", "size"), [((2, 3, 30, 25), 32), ((10, 20, 150, 160), 96)])
def test_without_colours_each_channel_is_rendered_as_it_would_be_alone(changes, box, size):
    image, view = bands(200, 240, 5), replace(PLAIN, box=box, size=size, **changes)
    rendered = render(view, image)
    for channel in range(5):
        alone = np.repeat(image[..., channel, None], 3, axis=2)
        far = np.abs(rendered[channel].astype(int) - render(view, alone)[0])
        assert (far > 1).mean() < (0.02 if view.solarize else 1e-9)  # rounding may cross the threshold


@pytest.mark.parametrize(("box", "size"), [((2, 3, 30, 25), 32), ((10, 20, 150, 160), 96)])
def test_gray_images_of_one_and_of_three_channels_look_the_same(box, size):
    gray = picture(200, 240)[..., :1]
    jitter = replace(JITTER, saturation=1.0, hue=0.0)
    view = replace(PLAIN, box=box, size=size, jitter=jitter, blur=0.8, flip=True, grayscale=True)
    one, three = render(view, gray), render(view, np.repeat(gray, 3, axis=2))
    assert np.abs(three.astype(int) - one).max() <= 1


def test_gray_views_of_many_channels_show_their_mean():
    image = bands(40, 40, 5)
    view = replace(PLAIN, grayscale=True)
    rendered = render(view, image)
    mean = render(PLAIN, image).mean(axis=0)
    assert (rendered == rendered[0]).all()
    assert np.abs(rendered[0] - mean).max() <= 1
