"""Colours in batches on the device against those that `render` gives one view."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nestling.ssl.config import Views
from nestling.ssl.randomness import Stream, generator
from nestling.ssl.views.on_device import ORDER, colored, colors_by_size, colors_of, without_colors
from nestling.ssl.views.plan import draw
from nestling.ssl.views.render import normalize, render

HALF = 0.5 + 5e-3  # gray levels: views of the loader are rounded, those of the device aren't
EVERYTHING = Views(hue=0.5, blur_sigma=[0.1, 6.0], local_blur=0.5, global_solarize=[0.2, 0.4])


def picture(height, width, channels):
    random = np.random.default_rng(0)
    rows, columns = np.mgrid[:height, :width]
    waves = [np.sin(rows / (7 + c) + columns / (11 - c)) for c in range(channels)]
    return (
        (128 + 110 * np.stack(waves, 2) + random.normal(0, 9, (height, width, channels)))
        .clip(0, 255)
        .astype(np.uint8)
    )


def drawn(shape, views, sizes, count=12):
    """Per image its views, as in the loader."""
    return [draw(generator(0, Stream.VIEWS, 0, i), *shape, views, *sizes) for i in range(count)]


def rendered(views, image):
    return torch.from_numpy(np.stack([render(view, image) for view in views]))


def rendered_alone(views, pixels):
    """The colours of views that have their size already."""
    images = pixels.permute(0, 2, 3, 1).numpy()
    boxes = [replace(view, box=(0, 0, view.size, view.size), flip=False) for view in views]
    return torch.cat([rendered([view], image) for view, image in zip(boxes, images, strict=True)])


def by_size(planned):
    """The views of all images as a batch has them: view after view."""
    numbers = range(2), range(2, len(planned[0]))
    return [[views[number] for number in group for views in planned] for group in numbers]


def check(channels, sizes, device):
    """Both sizes of views of one image, each with every operation in it."""
    image, planned = picture(90, 120, channels), drawn((90, 120), EVERYTHING, sizes)
    for views, colors in zip(by_size(planned), colors_by_size(planned), strict=True):
        assert {name for name, _ in colors.steps} >= {*ORDER} - {"solarize"}
        pixels = rendered(map(without_colors, views), image)
        ours = colored(pixels.to(device), colors.to(torch.device(device))).cpu()
        assert ours.dtype == torch.float32
        assert (ours - rendered_alone(views, pixels)).abs().max() <= HALF
        assert (ours - pixels).abs().mean() > 10, "something was done"


@pytest.mark.parametrize("sizes", [(96, 70), (33, 8)])
@pytest.mark.parametrize("channels", [1, 2, 3, 5])
def test_colours_are_those_of_the_loader_before_rounding(channels, sizes):
    check(channels, sizes, "cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_colours_on_cuda_are_those_of_the_loader_before_rounding(channels):
    check(channels, (96, 33), "cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_the_host_never_waits():
    planned = drawn((90, 120), EVERYTHING, (48, 32))
    (views, _), (colors, _) = by_size(planned), colors_by_size(planned)
    images, colors = torch.zeros(len(views), 3, 48, 48, dtype=torch.uint8).pin_memory(), colors.pin_memory()
    device, mean = torch.device("cuda"), [0.5] * 3
    normalize(torch.zeros(1, 3, 1, 1, device=device), mean, mean)  # whose constants are sent once
    torch.cuda.set_sync_debug_mode("error")
    try:
        normalize(colored(images.to(device, non_blocking=True), colors.to(device)), mean, mean)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("shape", "sizes"), [((40, 50), (32, 16)), ((150, 200), (96, 70))])
def test_whole_views_differ_by_no_more_than_the_rounding_before_their_colours(shape, sizes):
    """`render` may keep fractions of a level from the resize, which contrast makes larger; bytes can't."""
    image, planned = picture(*shape, 3), drawn(shape, Views(global_solarize=[0.0, 0.0]), sizes, count=30)
    for views, colors in zip(by_size(planned), colors_by_size(planned), strict=True):
        far = (colored(rendered(map(without_colors, views), image), colors) - rendered(views, image)).abs()
        assert far.max() <= 3
        assert far.mean() < 0.5


@pytest.mark.parametrize("sigma", [0.1, 1.0, 2**0.5, 9.0])
@pytest.mark.parametrize("side", [1, 2, 5, 70])
def test_blur_of_any_width_holds_at_any_border(sigma, side):
    view = replace(without_colors(drawn((90, 120), Views(), (side, side), count=1)[0][0]), blur=sigma)
    pixels = rendered([without_colors(view)], picture(90, 120, 3))
    ours = colored(pixels, colors_of([view]))
    assert (ours - rendered_alone([view], pixels)).abs().max() <= HALF


def test_views_without_any_colours_are_left_as_they_are():
    views = [without_colors(view) for view in drawn((20, 20), Views(), (16, 8), count=1)[0][:2]]
    images = torch.randint(256, (2, 3, 16, 16), dtype=torch.uint8)
    colors = colors_of(views)
    assert colors.steps == ()
    assert torch.equal(colored(images, colors), images.float())
