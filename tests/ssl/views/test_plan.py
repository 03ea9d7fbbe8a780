import math
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from torchvision.transforms import ColorJitter, RandomResizedCrop

from nestling.ssl.config import Views
from nestling.ssl.randomness import Stream, generator
from nestling.ssl.views.plan import (
    Planned,
    central_box,
    draw,
    draw_box,
    reduced,
    reduction,
    sizes_at,
)


def drawn(count, height=100, width=150, cfg=None, stream=Stream.VIEWS):
    """One list of views per image."""
    cfg = cfg or Views()
    return [draw(generator(0, stream, 0, index), height, width, cfg, 224, 96) for index in range(count)]


def share(values):
    values = list(values)
    return sum(values) / len(values)


def test_equal_generators_draw_equal_views():
    assert drawn(3) == drawn(3)
    assert drawn(1)[0] != drawn(2)[1]


def test_two_global_views_come_first_then_the_local_ones():
    assert [view.size for view in drawn(1)[0]] == [224, 224] + [96] * 8
    assert [view.size for view in drawn(1, cfg=Views(num_local=0))[0]] == [224, 224]


def test_views_depend_neither_on_sizes_nor_on_the_views_beside_them():
    few = draw(generator(0, Stream.VIEWS, 0, 0), 100, 150, Views(num_local=1), 224, 96)
    many = draw(generator(0, Stream.VIEWS, 0, 0), 100, 150, Views(num_local=5), 64, 32)
    assert [replace(view, size=0) for view in few] == [replace(view, size=0) for view in many[:3]]
    plain = draw(generator(0, Stream.VIEWS, 0, 0), 100, 150, Views(num_local=1, jitter=0), 224, 96)
    assert [view.box for view in plain] == [view.box for view in few]


@pytest.mark.parametrize(("height", "width"), [(100, 150), (150, 100), (32, 32), (40, 400)])
@pytest.mark.parametrize("scale", [[0.4, 1.0], [0.05, 0.4]])
def test_boxes_are_distributed_as_torchvision_draws_them(height, width, scale):
    count, ratio = 2000, [0.75, 4 / 3]
    rows = generator(1, Stream.VIEWS, 0, 0).random((count, 40)).tolist()
    ours = np.array([draw_box(row, height, width, scale, ratio) for row in rows], dtype=float)
    torch.manual_seed(0)
    image = torch.empty(3, height, width)
    theirs = np.array([RandomResizedCrop.get_params(image, scale, ratio) for _ in range(count)], dtype=float)
    assert ours.min(axis=0)[2:].min() >= 1
    assert (ours[:, 0] + ours[:, 2] <= height).all()
    assert (ours[:, 1] + ours[:, 3] <= width).all()

    def statistics(boxes):
        top, left, h, w = boxes.T
        return np.stack(
            [h * w / (height * width), np.log(w / h), (top + h / 2) / height, (left + w / 2) / width]
        )

    for mine, other in zip(statistics(ours), statistics(theirs), strict=True):
        spread = max(other.std(), 1e-3)
        quantiles = [np.quantile(each, [0.1, 0.25, 0.5, 0.75, 0.9]) for each in (mine, other)]
        assert np.abs(quantiles[0] - quantiles[1]).max() < 0.2 * spread + 0.01
        assert abs(mine.mean() - other.mean()) < 5 * spread / math.sqrt(count) * math.sqrt(2)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 4000), (4000, 1), (3, 2), (10, 100)])
def test_where_no_box_fits_the_central_one_is_torchvisions(height, width):
    scale, ratio = [1.0, 1.0], [0.75, 4 / 3]
    top, left, h, w = draw_box([0.5] * 40, height, width, scale, ratio)
    assert h >= 1
    assert w >= 1
    assert 0 <= top <= height - h
    assert 0 <= left <= width - w
    if (height, width) in [(4000, 1), (1, 4000), (10, 100)]:
        theirs = RandomResizedCrop.get_params(torch.empty(3, height, width), scale, ratio)
        assert central_box(height, width, ratio) == theirs == (top, left, h, w)


def test_probabilities_and_ranges_are_those_of_the_config():
    views = drawn(2000, cfg=Views(num_local=1, solarize_threshold=99))
    first, second, local = zip(*views, strict=True)
    for group, blur, solarize in ((first, 1.0, 0.0), (second, 0.1, 0.2), (local, 0.5, 0.0)):
        assert abs(share(view.blur is not None for view in group) - blur) < 0.04
        assert abs(share(view.solarize == 99 for view in group) - solarize) < 0.04
        assert abs(share(view.flip for view in group) - 0.5) < 0.04
        assert abs(share(view.grayscale for view in group) - 0.2) < 0.04
        assert abs(share(view.jitter is not None for view in group) - 0.8) < 0.04
    sigmas = [view.blur for view in first]
    assert 0.1 <= min(sigmas) < 0.15 < 1.95 < max(sigmas) <= 2.0


def test_jitter_is_distributed_as_torchvision_draws_it():
    jitters = [view.jitter for views in drawn(500) for view in views if view.jitter]
    reference = ColorJitter(0.4, 0.4, 0.2, 0.1)
    for name in ("brightness", "contrast", "saturation", "hue"):
        low, high = getattr(reference, name)
        values = np.array([getattr(jitter, name) for jitter in jitters])
        assert low <= values.min() < low + 0.02 * (high - low)
        assert high - 0.02 * (high - low) < values.max() <= high
        assert abs(values.mean() - (low + high) / 2) < 0.03 * (high - low)
    orders = {jitter.order for jitter in jitters}
    assert len(orders) == 24
    assert abs(share(jitter.order[0] == 3 for jitter in jitters) - 0.25) < 0.05


def test_zero_and_one_as_probabilities_are_never_and_always():
    never = Views(flip=0, jitter=0, grayscale=0, global_blur=[0, 0], local_blur=0, global_solarize=[0, 0])
    for view in chain(*drawn(50, cfg=never)):
        assert (view.flip, view.jitter, view.grayscale, view.blur, view.solarize) == (
            False,
            None,
            False,
            None,
            None,
        )
    always = Views(flip=1, jitter=1, grayscale=1, global_blur=[1, 1], local_blur=1, global_solarize=[1, 1])
    for view in chain(*drawn(50, cfg=always)):
        assert view.flip
        assert view.jitter
        assert view.grayscale
        assert view.blur


def test_sizes_are_of_seed_and_step_alone_and_each_is_drawn():
    cfg = Views(global_size=[192, 224, 256], local_size=[64, 96])
    sizes = [sizes_at(cfg, 0, step) for step in range(300)]
    assert sizes == [sizes_at(cfg, 0, step) for step in range(300)]
    assert set(sizes) == {(g, s) for g in (192, 224, 256) for s in (64, 96)}
    assert abs(share(g == 192 for g, _ in sizes) - 1 / 3) < 0.1
    assert sizes != [sizes_at(cfg, 1, step) for step in range(300)]
    assert sizes_at(Views(), 0, 5) == (224, 96)


def planned(index, sizes=(96, 32)):
    return Planned(partial(generator, 0, Stream.VIEWS, 0, index), Views(), *sizes)


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 375), (1201, 1599), (97, 2000)])
def test_an_image_is_reduced_as_far_as_each_view_still_shrinks_its_box(height, width):
    for index in range(50):
        plan = planned(index)
        factor, views = plan(height, width), plan.of(height, width)
        shape = (math.ceil(height / factor), math.ceil(width / factor), 3)
        small = plan.of(height, width, shape)
        for view, less in zip(views, small, strict=True):
            top, left, h, w = less.box
            assert replace(less, box=view.box) == view
            assert min(h, w) >= view.size
            assert top >= 0
            assert left >= 0
            assert top + h <= shape[0]
            assert left + w <= shape[1]
            edges = zip(less.box, view.box, strict=True)
            assert max(abs(little - large / factor) for little, large in edges) <= 1
        assert factor == 8 or any(min(view.box[2:]) < 2 * factor * (view.size + 1) for view in views)
        assert views == draw(generator(0, Stream.VIEWS, 0, index), height, width, Views(), 96, 32)


def test_each_factor_occurs_and_boxes_are_those_of_the_smaller_image():
    factors = {planned(index)(side, side) for index in range(20) for side in (100, 500, 1200, 3000)}
    assert factors == {1, 2, 4, 8}
    assert reduced((10, 21, 100, 200), 2) == (5, 10, 50, 100)  # 21 / 2 and 221 / 2 to the even one
    assert reduction(draw(generator(0, Stream.VIEWS, 0, 0), 100, 100, Views(), 224, 96)) == 1
