"""Pictures: what is drawn where, and that nothing overlaps or fails at odd sizes."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from nestling import backbones
from nestling.ssl.evaluation import canvas
from nestling.ssl.evaluation.curve import _apart, learning_curve
from nestling.ssl.evaluation.pictures import Query, as_rgb, focus_map, heat_over, neighbours, summary

MEAN, STD = [0.5, 0.5, 0.5], [0.5, 0.5, 0.5]


def flat(color, size=(32, 32)):
    return np.full((*size, 3), color, np.uint8)


def query(label, neighbour_labels):
    return Query(flat((0, 0, 255)), label, [flat((9, 9, 9)) for _ in neighbour_labels], neighbour_labels)


def has(image, color):
    return bool((np.array(image) == color).all(-1).any())


def test_frames_are_green_where_the_class_is_right_and_orange_where_not():
    right = neighbours([query("cat", ["cat", "cat"])])
    wrong = neighbours([query("cat", ["dog", "dog"])])
    assert has(right, canvas.RIGHT)
    assert not has(right, canvas.WRONG)
    assert has(wrong, canvas.WRONG)
    assert not has(wrong, canvas.RIGHT)
    assert has(right, (0, 0, 255))


def test_rows_may_differ_in_length_and_names_may_be_long():
    short, long = neighbours([query("a", ["a"])]), neighbours([query("a" * 90, ["a"] * 6), query("b", ["b"])])
    assert long.width > short.width
    assert not has(long.crop((146, 0, 150, long.height)), canvas.INK)  # the name stops before the tile


@pytest.mark.parametrize(
    ("size", "short_side", "grid"), [((40, 60), 32, (8, 12)), ((60, 31), 16, (8, 4)), ((4, 900), 16, (4, 8))]
)
def test_attention_of_a_whole_photograph_has_its_shape(size, short_side, grid):
    backbone = backbones.create("xcit_nano_12_p4", embed_dim=16, depth=1, num_heads=2, drop_path=0.5).train()
    photo = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    first, second = (focus_map(backbone, photo, short_side, MEAN, STD, "cpu") for _ in range(2))
    assert first.shape == grid
    assert np.array_equal(first, second)  # nothing dropped
    assert backbone.training
    assert 0 < first.sum() <= 1


def test_heat_is_brightest_where_attention_is():
    attention = np.zeros((4, 4), np.float32)
    attention[3, 0] = 1
    glow = np.array(heat_over(flat((128, 128, 128), (64, 64)), attention, (64, 64)).convert("L"), int)
    assert glow[56:, :8].mean() > 1.5 * glow[:32, 32:].mean()
    heat_over(flat((128, 128, 128)), np.ones((2, 2), np.float32), (20, 20))  # constant attention


@pytest.mark.parametrize("points", [[(0, 0.5)], [(0, 0.2), (1, 1.0)], [(10, 0.0), (300, 0.97)]])
def test_a_curve_of_any_length_is_drawn_inside_the_page(points):
    page = learning_curve({"class token": points}, {"raw pixels": 0.24, "untrained": 0.25}, 600, 300)
    assert page.size == (600, 300)
    pixels = np.array(page)
    assert has(page, canvas.SERIES[0])
    for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]):
        assert (edge == 255).all()


def test_labels_keep_their_distance_and_order():
    moved = _apart({"a": 50, "b": 51, "c": 52, "d": 10}, 20, top=0, bottom=100)
    heights = sorted(moved.values())
    assert sorted(moved, key=moved.get) == ["d", "a", "b", "c"]
    assert min(b - a for a, b in pairwise(heights)) >= 20
    assert heights[-1] <= 100


def test_text_is_cut_or_wrapped_to_its_width():
    assert canvas.text_width(canvas.shortened("a long name " * 9, 20, 150), 20) <= 150
    lines = canvas.wrapped("some words that need more than one line", 17, 120)
    assert len(lines) > 1
    assert " ".join(lines) == "some words that need more than one line"
    assert all(canvas.text_width(line, 17) <= 120 for line in lines)


def test_the_summary_holds_all_parts():
    generator = torch.Generator().manual_seed(0)
    maps = [(f"short side {side}", torch.rand(side, side, generator=generator).numpy()) for side in (8, 16)]
    page = summary(
        "title", [query("a", ["a", "b"])], flat((1, 2, 3), (60, 90)), maps, True, {"cls": [(0, 0.5)]}, {}
    )
    for color in (canvas.RIGHT, canvas.WRONG, canvas.SERIES[0], (1, 2, 3)):
        assert has(page, color)
    border = np.array(page)
    border[40:-40, 40:-40] = 255
    assert (border == 255).all()


@pytest.mark.parametrize(
    ("channels", "drawn"), [(1, [0, 0, 0]), (2, [0, 1, 0]), (3, [0, 1, 2]), (5, [0, 1, 2])]
)
def test_images_of_any_number_of_channels_are_drawn(channels, drawn):
    image = np.random.default_rng(0).integers(0, 256, (40, 60, channels), dtype=np.uint8)
    assert np.array_equal(as_rgb(image), image[:, :, drawn])
    backbone = backbones.create("xcit_nano_12_p4", in_chans=channels, embed_dim=16, depth=1, num_heads=2)
    statistics = [0.5] * channels
    focus = focus_map(backbone, image, 16, statistics, statistics, "cpu")
    assert focus.shape == (4, 6)
    queries = [Query(image, "a", [image], ["a"])]
    summary("title", queries, image, [("16", focus)], True, {"cls": [(0, 0.5)]}, {})
