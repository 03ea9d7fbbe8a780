"""The compiled kernel against NumPy and PyTorch, and against what would lead it out of its memory."""

import importlib.machinery
import importlib.util
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from nestling.ssl import views as views_package
from nestling.ssl.config import Views
from nestling.ssl.randomness import Stream, generator
from nestling.ssl.run import memory
from nestling.ssl.views import render as render_module
from nestling.ssl.views.blur import gaussian_blur
from nestling.ssl.views.color import jitter, to_gray
from nestling.ssl.views.plan import Jitter, View, draw
from nestling.ssl.views.render import render

pytestmark = pytest.mark.skipif(
    render_module.kernel is None, reason="the kernel is not built: run pip install -e ."
)

WHOLE = View((0, 0, 40, 40), 40, flip=False, jitter=None, grayscale=False, blur=None, solarize=None)


def noise(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def planes_of(image):
    return np.ascontiguousarray(image.transpose(2, 0, 1)).astype(np.float32)


def rounded(planes):
    return (planes + np.float32(0.5)).astype(np.uint8)


def far(ours, theirs):
    return np.abs(ours.astype(int) - theirs).max()


@pytest.mark.parametrize("channels", [1, 2, 3, 5])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1), (2, 3, 0), (1,), ()])
@pytest.mark.parametrize("hue", [-0.5, -0.3, -0.1, 0.0, 0.06, 0.2, 0.37, 0.5])
def test_jitter_of_noise_is_that_of_numpy_to_the_last_level(channels, order, hue):
    """Without a resize both begin with the same levels; on half of one a rounding may fall either way."""
    image, drawn = noise(40, 40, channels), Jitter(order, 1.3, 0.7, 1.2, hue)
    ours = render(replace(WHOLE, jitter=drawn), image)
    theirs = rounded(jitter(planes_of(image), drawn))
    assert far(ours, theirs) <= 1
    assert (ours != theirs).mean() < 2e-3


@pytest.mark.parametrize("channels", [1, 2, 3, 5])
def test_gray_is_that_of_numpy(channels):
    image = noise(40, 40, channels)
    gray = render(replace(WHOLE, grayscale=True), image)
    assert far(gray, np.repeat(rounded(to_gray(planes_of(image)))[None], channels, axis=0)) <= 1


@pytest.mark.parametrize("sigma", [0.1, 0.5, 1.0, 1.41, 1.42, 2.0, 5.0, 30.0])
def test_blur_is_that_of_numpy(sigma):
    image = noise(40, 40, 3)
    assert (
        far(render(replace(WHOLE, blur=sigma), image), rounded(gaussian_blur(planes_of(image), sigma))) <= 1
    )


@pytest.mark.parametrize("shape", [(375, 500), (64, 48), (1, 1), (1, 300), (300, 1)])
@pytest.mark.parametrize("sizes", [(224, 96), (33, 1), (16, 7)])
def test_drawn_views_are_those_of_numpy_and_pytorch_within_their_roundings(shape, sizes, monkeypatch):
    """PyTorch rounds twice in a resize, and colours multiply that by up to 1.4 * 1.4 * 1.2.

    The noise leaves room for what bicubic overshoots, as small views are not clipped between the two sums.
    """
    image = 64 + noise(*shape, 3) // 2
    for index in range(3):
        views = draw(generator(0, Stream.VIEWS, 0, index), *shape, Views(global_solarize=[0, 0]), *sizes)
        ours = [render(view, image) for view in views]
        with monkeypatch.context() as patch:
            patch.setattr(render_module, "kernel", None)
            theirs = [render(view, image) for view in views]
        differences = [np.abs(a.astype(int) - b) for a, b in zip(ours, theirs, strict=True)]
        assert max(difference.max() for difference in differences) <= 6
        assert np.mean([difference.mean() for difference in differences]) < 0.5


def exactly_resized(image, size):
    """Bicubic and antialiased in 64 bits, clipped after each axis as Pillow's."""
    planes = torch.from_numpy(image).permute(2, 0, 1)[None].double()
    for shape in ((image.shape[0], size), (size, size)):
        planes = F.interpolate(planes, size=shape, mode="bicubic", antialias=True).clamp(0, 255)
    return planes[0].numpy()


@pytest.mark.parametrize(
    ("height", "width", "size"),
    [
        (150, 200, 224),
        (330, 300, 40),
        (400, 900, 40),
        (1000, 800, 16),
        *[(2000, 20, 16), (20, 2000, 16), (8000, 30, 48), (30, 8000, 48), (16000, 16, 96), (16, 16000, 96)],
    ],
)
def test_a_resize_is_rounded_and_not_biased_however_much_it_shrinks(height, width, size):
    y, x = np.mgrid[0:height, 0:width]
    smooth = 128 + 100 * np.sin(5 * y / height) * np.cos(4 * x / width)
    for image in (smooth.round().astype(np.uint8)[..., None], noise(height, width, 3)):
        view = replace(WHOLE, box=(0, 0, height, width), size=size)
        errors = render(view, image) - exactly_resized(image, size)
        assert np.abs(errors).max() < 0.75
        assert abs(errors.mean()) < 0.1


def test_constants_stay_what_they_are():
    for level in (0, 1, 127, 254, 255):
        for side in (17, 40, 333, 700):
            view = replace(WHOLE, box=(0, 0, side, side), blur=1.3)
            assert (render(view, np.full((side, side, 3), level, dtype=np.uint8)) == level).all()


def test_a_view_is_written_where_it_is_asked_for_and_nowhere_else():
    batch = np.full((3, 3, 40, 40), 7, dtype=np.uint8)
    assert render(WHOLE, noise(40, 40, 3), batch[1]) is not None
    assert np.array_equal(batch[1], noise(40, 40, 3).transpose(2, 0, 1))
    assert (batch[[0, 2]] == 7).all()


def test_threads_do_not_disturb_each_other():
    image = noise(300, 400, 3)
    views = draw(generator(0, Stream.VIEWS, 0, 0), 300, 400, Views(num_local=30), 224, 96)
    alone = [render(view, image) for view in views]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda view: render(view, image), views))
    assert all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))


GOOD = {
    "shape": (40, 40, 3),
    "box": (0, 0, 40, 40),
    "size": 40,
    "order": bytes([0, 1, 2, 3]),
    "sigma": 1.0,
    "out": np.empty((3, 40, 40), np.uint8),
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"shape": (41, 40, 3)},
        {"shape": (40, 40, 0)},
        {"shape": (-40, -40, 3)},
        {"box": (1, 0, 40, 40)},
        {"box": (0, -1, 40, 40)},
        {"box": (0, 0, 0, 40)},
        {"size": 41},
        {"size": 0},
        {"order": bytes([4])},
        {"order": bytes(5)},
        {"sigma": -1.0},
        {"sigma": float("nan")},
        {"out": np.empty((3, 40, 39), np.uint8)},
        {"out": np.empty((3, 40, 80), np.uint8)[..., ::2]},
        {"out": bytes(3 * 40 * 40)},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_what_does_not_fit_is_refused(wrong):
    def call(shape, box, size, order, sigma, out):
        factors = (1.0, 1.0, 1.0, 0.0)
        image = noise(40, 40, 3)
        render_module.kernel.render(image, shape, box, size, False, order, factors, False, sigma, 256, out)

    call(**GOOD)
    with pytest.raises((ValueError, TypeError), match=r"does not fit the sizes|must be read-write"):
        call(**{**GOOD, **wrong})


@pytest.mark.skipif(sys.platform != "linux", reason="what a process holds is read from /proc")
def test_memory_is_kept_and_not_lost():
    """Ten thousand small views and a few large ones, within what one of each takes."""
    image = noise(600, 800, 3)
    large = replace(WHOLE, box=(0, 0, 600, 800), size=512, blur=1.0)
    small = replace(WHOLE, size=8)
    for view in (large, small):
        render(view, image)
    before = memory.status("VmRSS")
    for number in range(10_000):
        render(small if number % 500 else large, image)
    assert memory.status("VmRSS") - before < 8 * 2**20


def imported_anew():
    """What render.py imports as kernel, when it is run once more."""
    spec = importlib.util.spec_from_file_location("render_anew", render_module.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.kernel


def test_a_kernel_that_is_there_and_cannot_be_loaded_is_told_and_one_that_is_missing_is_not(
    monkeypatch, tmp_path
):
    assert imported_anew() is render_module.kernel
    name = "nestling.ssl.views.kernel"
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(views_package, "__path__", [str(tmp_path)])
    assert imported_anew() is None
    (tmp_path / f"kernel{importlib.machinery.EXTENSION_SUFFIXES[0]}").write_bytes(b"not a library")
    importlib.invalidate_caches()
    with pytest.raises(
        ImportError, match=r"nestling's compiled kernel can't be loaded, reinstall nestling: ."
    ):
        imported_anew()
