"""A learned position table at every grid, against torch's own interpolation in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nestling.backbones.position_table import cubic_weights, resize_positions

SIDES = range(1, 131)


def random_table(side: int) -> Tensor:
    """Shape: (S * S, 2)"""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(side * side, 2, generator=generator, dtype=torch.float64)


def by_torch(table: Tensor, side: int, antialias: bool = False, **target: tuple[float, float]) -> Tensor:
    """Shape: (S * S, C) -> (h, w, C)"""
    image = table.unflatten(0, (side, side)).permute(2, 0, 1)[None]
    if (
        antialias and "size" in target
    ):  # rows first: torch's antialiasing to a width of 1 in one go is wrong on CPU
        rows = (target["size"][0], side)
        image = F.interpolate(image, size=rows, mode="bicubic", align_corners=False, antialias=True)
    resized = F.interpolate(image, mode="bicubic", align_corners=False, antialias=antialias, **target)
    return resized[0].permute(1, 2, 0)


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("side", [1, 2, 14, 37])
def test_every_grid_from_1_to_130_a_side_equals_interpolation_by_size(side, antialias):
    table = random_table(side)
    for height in SIDES:
        grid = (height, 1 + height * 47 % 130)  # every width once, too
        ours = resize_positions(table, grid, antialias=antialias).unflatten(0, grid)
        theirs = by_torch(table, side, antialias, size=grid)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11, msg=f"{grid}")


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("side", [14, 16, 28, 37])
def test_offset_equals_interpolation_by_scale_where_that_has_the_right_size(side, antialias):
    table, compared = random_table(side), 0
    for height in SIDES:
        grid = (height, 2 + height * 47 % 129)
        scales = tuple((length + 0.1) / side for length in grid)
        theirs = by_torch(table, side, antialias, scale_factor=scales)
        # At the table's own length we take the table; torch's antialiasing takes each such axis as it is.
        same = (side in grid) if antialias else grid == (side, side)
        if theirs.shape[:2] == grid and not same:
            ours = resize_positions(table, grid, 0.1, antialias).unflatten(0, grid)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11, msg=f"{grid}")
            compared += 1
    assert compared > 100


@pytest.mark.parametrize(
    ("side", "patch", "pixels"), [(14, 16, 976), (14, 16, 1840), (14, 16, 1952), (37, 14, 546), (37, 14, 602)]
)
def test_grids_that_a_scale_factor_misses_by_one_are_right(side, patch, pixels):
    length, table = pixels // patch, random_table(side)
    assert by_torch(table, side, scale_factor=(length / side,) * 2).shape[0] == length - 1
    ours = resize_positions(table, (length, length)).unflatten(0, (length, length))
    torch.testing.assert_close(ours, by_torch(table, side, size=(length, length)), rtol=0, atol=1e-11)


@pytest.mark.parametrize("offset", [0.0, 0.1])
@pytest.mark.parametrize("antialias", [False, True])
def test_an_unchanged_grid_gives_the_table_itself(offset, antialias):
    table = random_table(14).float()
    assert resize_positions(table, (14, 14), offset, antialias) is table


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("antialias", [False, True])
def test_weights_at_an_unchanged_length_are_the_identity_to_the_bit(dtype, antialias):
    for side in SIDES:
        weights = cubic_weights(side, side, torch.ones((), dtype=dtype), antialias)
        assert torch.equal(weights, torch.eye(side, dtype=dtype))


def test_a_grid_of_the_tables_size_but_another_shape_is_interpolated():
    table = random_table(4)
    ours = resize_positions(table, (2, 8)).unflatten(0, (2, 8))
    torch.testing.assert_close(ours, by_torch(table, 4, size=(2, 8)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("antialias", [False, True])
def test_the_gradient_of_the_table_equals_torchs(antialias):
    ours, theirs = (random_table(5).requires_grad_() for _ in "ab")
    weight = torch.randn(21, 2, dtype=torch.float64)
    (resize_positions(ours, (3, 7), antialias=antialias) * weight).sum().backward()
    (by_torch(theirs, 5, antialias, size=(3, 7)).flatten(0, 1) * weight).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)


def test_half_precision_is_interpolated_in_single_precision():
    table = random_table(14).bfloat16()
    in_single = resize_positions(table.float(), (6, 9))
    assert torch.equal(resize_positions(table, (6, 9)), in_single.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(resize_positions(table.float(), (6, 9)), in_single)


@pytest.mark.parametrize(("offset", "antialias"), [(0.0, False), (0.1, False), (0.0, True)])
def test_a_constant_table_stays_constant(offset, antialias):
    table = torch.full((49, 3), 2.5, dtype=torch.float64)
    resized = resize_positions(table, (5, 11), offset, antialias)
    torch.testing.assert_close(resized, torch.full((55, 3), 2.5, dtype=torch.float64), rtol=0, atol=1e-12)
