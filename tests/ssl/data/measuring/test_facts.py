"""Sums over images against numpy on all of them at once."""

import os
import signal

import numpy as np
import pytest

from nestling.ssl.data.measuring.facts import Depth, Facts, histogram, size_facts, suggested_window
from nestling.ssl.data.measuring.measure import Measured, WatchingDecoder, facts_of
from nestling.ssl.data.measuring.report import lines
from nestling.ssl.data.sources.base import ImageSource
from nestling.ssl.errors import UserError


class Listed(ImageSource):
    """Images from a list."""

    name = "listed"

    def __init__(self, images, decoder):
        self.images, self._decoder = images, decoder

    def __len__(self):
        return len(self.images)

    def path(self, index):
        return f"/{index}"

    def load(self, index):
        return self._decoder.array(self.images[index], self.path(index))


def images_of(channels, count=12):
    random = np.random.default_rng(0)
    return [
        random.integers(0, 256, (*random.integers(1, 40, 2), channels), dtype=np.uint8) for _ in range(count)
    ]


def watched(images, kind=Listed, **decoder):
    watching = WatchingDecoder(**decoder)
    return Measured(kind(images, watching), watching)


def measured(images, chunk=5, **decoder):
    parts = watched(images, **decoder)
    facts = Facts.none(parts.decoder.channels)
    for start in range(0, len(images), chunk):
        facts.join(parts[list(range(start, min(start + chunk, len(images))))])
    return facts


class Deadly(Listed):
    """Kills the process that reads its last image."""

    def load(self, index):
        if index == len(self) - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().load(index)


@pytest.mark.parametrize(("channels", "mode"), [(3, "rgb"), (1, "gray"), (6, "unchanged")])
def test_mean_and_std_are_those_of_all_pixels(channels, mode):
    images = images_of(channels)
    pixels = np.concatenate([image.reshape(-1, channels) for image in images]) / 255
    facts = measured(images, mode=mode, channels=channels)
    assert np.allclose(facts.mean(), pixels.mean(axis=0), rtol=1e-13)
    assert np.allclose(facts.std(), pixels.std(axis=0), rtol=1e-13)


def test_parts_in_any_order_give_the_same_sums():
    images = images_of(3)
    whole, parts = measured(images, chunk=12), measured(images[::-1], chunk=1)
    assert np.array_equal(whole.mean(), parts.mean())
    assert np.array_equal(whole.std(), parts.std())


def test_sizes_are_height_and_width_of_each_image():
    images = images_of(3)
    assert measured(images).heights_and_widths().tolist() == [list(image.shape[:2]) for image in images]


def test_duplicates_are_equal_pixels_in_equal_shapes():
    zeros = [
        np.zeros(shape, dtype=np.uint8) for shape in ((4, 6, 3), (6, 4, 3), (4, 6, 3), (4, 6, 3), (2, 12, 3))
    ]
    other = images_of(3, 2)
    groups = measured([other[0], *zeros, other[1], other[0]], chunk=3).duplicates()
    assert [group.tolist() for group in groups] == [[0, 7], [1, 3, 4]]
    assert measured(images_of(3)).duplicates() == []
    assert Facts.none(3).duplicates() == []


def test_an_image_that_cannot_be_read_is_named_and_not_counted():
    broken = np.full((3, 3, 1), np.nan)
    images = [images_of(3, 1)[0], broken, images_of(3, 1)[0]]
    facts = measured(images)
    assert (len(facts), [failure.path for failure in facts.failures]) == (2, ["/1"])
    assert "not finite" in facts.failures[0].reason
    assert facts.depths == {}
    assert [group.tolist() for group in facts.duplicates()] == [[0, 2]]


def test_deep_images_tell_their_range_before_scaling():
    deep = [np.full((2, 2), value, dtype=np.uint16) for value in (40, 900, 7)]
    floats = [np.array([[-2.5, 3.0]])]
    eight = images_of(1, 2)
    facts = measured([*deep, *floats, *eight], chunk=2, mode="gray", channels=1)
    assert facts.depths == {"uint16": Depth(3, 7, 900), "float64": Depth(1, -2.5, 3)}


def test_opacity_is_no_part_of_the_range():
    pixels = np.full((2, 2, 4), 100, dtype=np.uint16)
    pixels[:, :, 3] = 65535
    assert measured([pixels]).depths == {"uint16": Depth(1, 100, 100)}


@pytest.mark.parametrize(
    ("depths", "window"),
    [
        ({}, None),
        ({"uint16": (0, 65535)}, None),
        ({"uint16": (100, 40000)}, None),
        ({"uint16": (0, 4095)}, [0, 4095]),
        ({"uint16": (30, 30)}, None),
        ({"int16": (-1024, 3071)}, [-1024, 3071]),
        ({"int32": (0, 60000)}, None),
        ({"int32": (0, 80000)}, [0, 80000]),
        ({"float32": (0, 0.9)}, None),
        ({"float32": (0, 0.1)}, [0, 0.1]),
        ({"float32": (-1, 1)}, [-1, 1]),
        ({"uint16": (5, 4095), "int16": (0, 300)}, [0, 4095]),
    ],
)
def test_a_window_is_suggested_where_the_range_of_the_type_does_not_fit(depths, window):
    assert suggested_window({kind: Depth(1, *values) for kind, values in depths.items()}) == window


def test_histograms_count_each_value_once():
    assert histogram(np.array([1, 5, 6, 30]), (2, 5, 10, 20), ("2", "5", "10", "20")) == {
        "below 2": 1,
        "2 to 5": 0,
        "5 to 10": 2,
        "10 to 20": 0,
        "from 20": 1,
    }
    assert histogram(np.array([3, 3]), (2, 5, 10), ("2", "5", "10")) == {"2 to 5": 2}


def test_sizes_are_summed_up():
    found = size_facts(np.array([[95, 200], [300, 96], [50, 40]]))
    assert found["height"] == [50, 300]
    assert found["width"] == [40, 200]
    assert found["shorter_side"] == {
        "min": 40,
        "median": 95.0,
        "max": 96,
        "histogram": {"32 to 64": 1, "64 to 96": 1, "96 to 128": 1},
    }
    assert found["width_over_height"] == {
        "1/4 to 1/2": 1,
        "1/2 to 3/4": 0,
        "3/4 to 4/3": 1,
        "4/3 to 2": 0,
        "2 to 4": 1,
    }
    assert found["shorter_side_below_96"] == 2


def test_a_channel_that_is_the_same_everywhere_is_divided_by_one():
    found = {
        "source": "s",
        "images": 1,
        "measured": 1,
        "readable": 1,
        "passed_over": "",
        "mean": [0.5, 1.0],
        "std": [0.25, 0.0],
        "sizes": size_facts(np.array([[9, 9]])),
        "depths": {},
        "window": None,
        "duplicates": [],
        "unreadable": [],
    }
    assert "  data.mean='[0.5, 1]' data.std='[0.25, 1]'" in list(lines(found))


def test_only_the_first_groups_of_duplicates_are_shown():
    groups = [[f"/{group}/{number}" for number in range(6)] for group in range(8)]
    found = {
        "source": "s",
        "images": 48,
        "measured": 48,
        "readable": 0,
        "passed_over": "3 other files",
        "depths": {},
        "window": None,
        "duplicates": groups,
        "unreadable": [],
    }
    assert list(lines(found)) == [
        "48 images in s, left out 3 other files",
        "duplicates: 40 images have the same pixels as another one; groups: 8",
        *(f"  /{group}/0 = /{group}/1 = /{group}/2 = /{group}/3 and 2 more" for group in range(5)),
        "  and 3 more groups",
        "unreadable: 0",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_processes_find_what_one_finds(start):
    images = images_of(3, 100)
    alone, shared = (facts_of(watched(images), np.arange(100), workers, start) for workers in (0, 2))
    assert np.array_equal(shared.levels, alone.levels)
    assert np.array_equal(shared.heights_and_widths(), alone.heights_and_widths())
    assert np.array_equal(np.concatenate(shared.digests), np.concatenate(alone.digests))


@pytest.mark.slow
def test_a_process_that_dies_ends_it_in_one_sentence():
    with pytest.raises(UserError, match=r"loader process .* killed from outside"):
        facts_of(watched(images_of(3, 200), Deadly), np.arange(200), 2, "fork")


def test_files_that_fail_for_one_reason_are_named_by_the_first_few_and_their_number():
    failures = [{"path": f"/i/{number}.tif", "reason": "has 8 channels"} for number in range(100)]
    failures.append({"path": "/i/a.jpg", "reason": "is empty"})
    found = {"images": 101, "measured": 101, "readable": 0, "source": "/i", "passed_over": "", "window": None}
    said = list(lines({**found, "depths": {}, "duplicates": [], "unreadable": failures}))
    assert said[-7:] == [
        "unreadable: 101",
        *(f"  /i/{number}.tif: has 8 channels" for number in range(4)),
        "  and 96 more of which each has 8 channels",
        "  /i/a.jpg: is empty",
    ]


def test_mean_and_std_are_said_to_belong_to_the_present_scale_where_another_is_suggested():
    found = measured([np.full((4, 4), value, np.uint16) for value in (100, 4000)], mode="gray", channels=1)
    shown = {
        "images": 2,
        "measured": 2,
        "readable": 2,
        "source": "/i",
        "passed_over": "",
        "unreadable": [],
        "mean": [0.03],
        "std": [0.02],
        "sizes": size_facts(found.heights_and_widths()),
        "duplicates": [],
        "depths": {"uint16": Depth(2, 100, 4000)._asdict()},
        "window": suggested_window(found.depths),
    }
    assert any("measure again" in line for line in lines(shown))
    assert not any("measure again" in line for line in lines({**shown, "window": None}))
