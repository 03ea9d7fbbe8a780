"""Test sizes as users write them, and those that a network can't take."""

import pytest

from nestling import backbones
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.resolution.sizes import around, read_sizes, refuse_unfit, shown


def test_a_size_is_a_side_or_height_by_width_each_once():
    assert read_sizes(["96", "224x320", " 96x96"]) == {"96": (96, 96), "224x320": (224, 320)}
    assert [shown(size) for size in ((7, 7), (7, 8))] == ["7", "7x8"]


@pytest.mark.parametrize("text", ["0", "x96", "96x", "9.5", "96X64", "-8", "100000"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UserError, match=rf"sizes: {text} is no size; write a side such as 224"):
        read_sizes(["96", text])


def test_a_size_that_a_family_cannot_take_is_refused_with_the_nearest_that_work():
    vit = backbones.create("vit_tiny_p16", depth=1, embed_dim=16, num_heads=2)
    refuse_unfit(vit, [(32, 32), (32, 48)])
    with pytest.raises(UserError, match=r"sizes: 32x40 can't be judged: .*multiples of 16.*32 or 48"):
        refuse_unfit(vit, [(32, 32), (32, 40)])


def test_sizes_that_nobody_names_lie_around_the_runs_own_in_whole_patches():
    assert around(224, 16) == ["112", "224", "336", "448"]
    assert around(32, 8) == ["16", "32", "48", "64"]
    assert around(8, 16) == ["16"]
