"""The largest numbers of rows against a sort of all, whatever is equal, above the floor, or too many."""

import pytest
import torch

from nestling.ssl.evaluation.knn.largest import GROUP, joined, largest


def drawn(levels=None, rows=7, groups=40, seed=0):
    numbers = torch.randn(rows, groups * GROUP, generator=torch.Generator().manual_seed(seed))
    return numbers if levels is None else (numbers * levels).round()


def found_in(numbers, values, places):
    """The values found, largest first, which are where they are said to be, each place once."""
    there = values > -torch.inf
    assert torch.equal(values[there], numbers.gather(1, places)[there])
    for row, mask in zip(places, there, strict=True):
        assert len(row[mask].unique()) == int(mask.sum())
    return values.sort(dim=1, descending=True).values


@pytest.mark.parametrize("levels", [None, 3, 0])  # all different, many equal, all equal
@pytest.mark.parametrize("count", [1, 9, 100])  # fewer than groups, and more
def test_without_a_floor_they_are_the_first_of_a_sort(levels, count):
    numbers = drawn(levels)
    values = found_in(numbers, *largest(numbers, count))
    assert torch.equal(values, numbers.sort(dim=1, descending=True).values[:, :count])


@pytest.mark.parametrize("reached", [1, 5, 60, 1100])  # how many of a row are at least its floor
def test_with_a_floor_they_are_those_above_it_as_far_as_they_are_wanted(reached):
    numbers = drawn(seed=1)
    ranked = numbers.sort(dim=1, descending=True).values
    floor = ranked[:, reached - 1]
    floor[0] = 99  # nothing is above
    values = found_in(numbers, *largest(numbers, 30, floor))
    for row, (value, every, least) in enumerate(zip(values, ranked, floor, strict=True)):
        wanted = every[every > least][:30]
        assert torch.equal(value[: len(wanted)], wanted), row
        # Below the floor it may tell more or nothing, never what is not there.
        assert (value[len(wanted) :] <= least).all()


def test_padding_is_not_found_and_tables_of_any_width_are_joined():
    numbers = drawn(groups=3)
    numbers[:, 70:] = -torch.inf
    values, places = largest(numbers, 70)
    assert torch.equal(places.sort(dim=1).values, torch.arange(70).expand(7, -1))
    together, where = joined([(values, places), (values[:2, :4], places[:2, :4])])
    assert together.shape == where.shape == (9, 70)
    assert torch.equal(together[7:, :4], values[:2, :4])
    assert (together[7:, 4:] == -torch.inf).all()
    none, _ = largest(numbers, 5, torch.full((7,), 99.0))
    assert none.shape == (7, 0)
