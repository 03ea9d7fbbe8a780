"""What takes the place of an unreadable image."""

import numpy as np
import pytest

from nestling.ssl.config import Data
from nestling.ssl.data.failures import UnreadableError
from nestling.ssl.data.order import SampleRef
from nestling.ssl.data.reading import TRIES, Reader, refuse_if_none_reads
from nestling.ssl.data.sources.base import ImageSource
from nestling.ssl.errors import UserError


class Shelf(ImageSource):
    """Images that are their own index, of which some can't be read."""

    name = "shelf"

    def __init__(self, count, bad, transient=False):
        self.count, self.bad, self.transient, self.asked = count, set(bad), transient, []

    def __len__(self):
        return self.count

    def path(self, index):
        return f"{index}.png"

    def load(self, index):
        self.asked.append(index)
        if index in self.bad:
            raise UnreadableError(self.path(index), "is torn", self.transient)
        return np.full((1, 1, 3), index, np.uint8)


def stand_in(source, image, pass_=0, seed=0):
    read = Reader(source, Data()).read_or_replace(SampleRef(image, pass_, step=0), seed)
    return int(read.image[0, 0, 0])


def test_the_stand_in_is_a_readable_image_that_depends_on_seed_pass_and_index_alone():
    source = Shelf(100, range(50))
    assert stand_in(source, 70) == 70
    chosen = stand_in(source, 7)
    assert chosen >= 50
    assert stand_in(Shelf(100, range(50)), 7) == chosen
    others = {stand_in(source, 7, pass_) for pass_ in range(20)} | {
        stand_in(source, 7, 0, s) for s in range(20)
    }
    assert len(others) > 10


def test_stand_ins_are_spread_over_all_images():
    source = Shelf(50, range(0, 50, 2))
    chosen = {stand_in(source, 2 * (n % 25), pass_=n // 25) for n in range(1000)}
    assert chosen == set(range(1, 50, 2))


def test_every_failure_on_the_way_is_told():
    read = Reader(Shelf(4, [0, 1, 2]), Data()).read_or_replace(SampleRef(0, 0, 0), seed=0)
    assert read.failures[0] == (0, "0.png", "is torn")
    assert {failure.image for failure in read.failures} <= {0, 1, 2}


def test_where_none_can_be_read_it_ends_and_names_the_first():
    source = Shelf(1000, range(1000))
    with pytest.raises(UserError, match=r"none of \d+ images tried, of 1000 in shelf, .*: 5\.png: is torn"):
        stand_in(source, 5)
    assert len(source.asked) == TRIES + 1


def test_what_does_not_pass_is_not_tried_again_but_told_again():
    source = Shelf(10, [3])
    reader = Reader(source, Data())
    assert reader.read(3) == reader.read(3)
    assert source.asked == [3]


def test_what_may_recover_is_tried_again():
    source = Shelf(10, [3], transient=True)
    reader = Reader(source, Data())
    reader.read(3)
    source.bad.clear()
    assert reader.read(3).failures == []


def test_raise_names_the_file_in_one_line():
    with pytest.raises(UserError, match=r"^3\.png: is torn; repair or remove it, or set data\.on_error=skip"):
        Reader(Shelf(10, [3]), Data(on_error="raise")).read(3)


def test_one_readable_image_among_those_looked_at_is_enough():
    source = Shelf(1000, range(999))
    refuse_if_none_reads(Shelf(4, [0, 1, 2]), Data())
    with pytest.raises(
        UserError, match=r"none of 20 images tried, of 1000 in shelf, can be read; .* 0\.png: is torn"
    ):
        refuse_if_none_reads(source, Data())
    assert len(source.asked) == TRIES
