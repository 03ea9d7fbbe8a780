"""Axial rotary positions: their formula, what follows from it, and the augmentations of DINOv3."""

import cmath
import math

import pytest
import torch
from torch import Tensor

from nestling import backbones
from nestling.backbones.rope import AxialRope, rotate


def rope(head_dim: int = 16, base: float = 100.0, shift=0.0, jitter=1.0, rescale=1.0) -> AxialRope:
    return AxialRope("vit", head_dim, base, shift, jitter, rescale)


def tables(layer: AxialRope, grid: tuple[int, int], prefix: int = 0) -> Tensor:
    return layer(grid, prefix, torch.device("cpu"), torch.float64)


def rotated_as_written(x: Tensor, grid: tuple[int, int], prefix: int, base: float) -> Tensor:
    """Every plane of every token as a complex number, turned about 0."""
    out = x.clone()
    half = x.shape[1] // 2
    for token in range(prefix, len(x)):
        row, column = divmod(token - prefix, grid[1])
        y, x_ = 2 * (row + 0.5) / grid[0] - 1, 2 * (column + 0.5) / grid[1] - 1
        for plane in range(half):
            number, coordinate = (plane, y) if plane < half // 2 else (plane - half // 2, x_)
            period = base ** (2 * number / half)
            turned = complex(x[token, plane], x[token, plane + half]) * cmath.exp(
                2j * math.pi * coordinate / period
            )
            out[token, plane], out[token, plane + half] = turned.real, turned.imag
    return out


@pytest.mark.parametrize(("grid", "prefix"), [((3, 5), 2), ((1, 1), 1), ((4, 2), 0)])
@pytest.mark.parametrize("base", [100.0, 7.0])
def test_rotation_equals_its_formula(grid, prefix, base):
    torch.manual_seed(0)
    x = torch.randn(prefix + grid[0] * grid[1], 16, dtype=torch.float64)
    ours = rotate(x, tables(rope(base=base), grid, prefix))
    torch.testing.assert_close(ours, rotated_as_written(x, grid, prefix, base), rtol=0, atol=1e-12)


def test_class_token_and_registers_are_left_as_they_are():
    x = torch.randn(5 + 6, 16, dtype=torch.float64)
    ours = rotate(x, tables(rope(), (2, 3), prefix=5))
    assert torch.equal(ours[:5], x[:5])
    assert not torch.isclose(ours[5:], x[5:]).all(dim=1).any()


def test_lengths_are_kept_and_products_depend_on_the_distance_alone():
    torch.manual_seed(0)
    query, key = torch.randn(2, 16, dtype=torch.float64)
    grid, table = (6, 8), tables(rope(), (6, 8))
    queries, keys = (rotate(vector.expand(48, 16), table) for vector in (query, key))
    torch.testing.assert_close(queries.norm(dim=1), query.norm().expand(48))
    products = (queries @ keys.T).unflatten(0, grid).unflatten(2, grid)  # h w h w
    torch.testing.assert_close(products[0, 0, 2, 3], products[3, 4, 5, 7])
    assert not torch.isclose(products[0, 0, 2, 3], products[0, 0, 3, 2])


@pytest.mark.parametrize("options", [{"shift": 0.5}, {"jitter": 2.0}, {"rescale": 2.0}])
def test_augmentations_change_positions_in_training_alone(options):
    plain, layer = tables(rope(), (3, 4), 1), rope(**options)
    assert not torch.equal(tables(layer.train(), (3, 4), 1), plain)
    assert torch.equal(tables(layer, (3, 4), 1)[:, 0], plain[:, 0])  # the class token never turns
    assert torch.equal(tables(layer.eval(), (3, 4), 1), plain)


def test_without_augmentations_training_draws_no_random_number():
    state = torch.get_rng_state()
    tables(rope().train(), (3, 4))
    assert torch.equal(torch.get_rng_state(), state)


def drawn(layer: AxialRope, grid: tuple[int, int], times: int = 1000) -> Tensor:
    """The last patch's coordinates, over what they are unaugmented where that isn't 0.

    Read off the slowest plane of each axis, whose angle never reaches half a turn.

    Shape: returns (times, 2), y and x
    """
    torch.manual_seed(0)
    period = layer.base ** (1 - 4 / layer.head_dim)
    unaugmented = 1 - 1 / grid[0] or 1.0
    angles = []
    for _ in range(times):
        cos, sin = tables(layer, grid)[:, -1]
        angles.append(torch.atan2(sin, cos)[[layer.head_dim // 4 - 1, -1]])
    return torch.stack(angles) * period / (2 * math.pi * unaugmented)


def assert_uniform(values: Tensor, bound: float) -> None:
    assert values.abs().max() <= bound * (1 + 1e-9)
    deciles = torch.quantile(values, torch.linspace(0, 1, 11, dtype=values.dtype))
    torch.testing.assert_close(
        deciles, torch.linspace(-bound, bound, 11, dtype=values.dtype), rtol=0, atol=0.1 * bound
    )


def test_the_shift_is_uniform_and_drawn_for_each_axis():
    shifts = drawn(rope(head_dim=32, base=1e4, shift=0.3).train(), (1, 1))
    assert_uniform(shifts[:, 0], 0.3)
    assert_uniform(shifts[:, 1], 0.3)
    assert torch.corrcoef(shifts.T)[0, 1].abs() < 0.1


def test_the_jitter_is_log_uniform_and_drawn_for_each_axis():
    factors = drawn(rope(head_dim=32, base=1e4, jitter=2.0).train(), (2, 2)).log()
    assert_uniform(factors[:, 0], math.log(2))
    assert_uniform(factors[:, 1], math.log(2))
    assert torch.corrcoef(factors.T)[0, 1].abs() < 0.1


def test_the_rescaling_is_log_uniform_and_shared():
    factors = drawn(rope(head_dim=32, base=1e4, rescale=4.0).train(), (2, 2)).log()
    assert_uniform(factors[:, 0], math.log(4))
    torch.testing.assert_close(factors[:, 0], factors[:, 1])


def test_all_blocks_of_a_forward_share_one_draw_and_the_next_draws_anew():
    model = backbones.create("vit_tiny_p16", depth=3, position="rope", rope_shift=0.5).train()
    seen: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    images = torch.randn(1, 3, 32, 48)
    model(images)
    model(images)
    assert seen[0] is seen[1] is seen[2]
    assert seen[3] is seen[4] is seen[5]
    assert not torch.equal(seen[0], seen[3])


def test_features_depend_on_the_arrangement_of_patches_with_rope_alone():
    torch.manual_seed(0)
    images = torch.randn(1, 3, 32, 32)
    for position, moves in (("rope", True), ("none", False)):
        model = backbones.create("vit_tiny_p16", depth=2, position=position).double().eval()
        before, after = model(images.double()), model(images.double().roll(16, dims=3))
        torch.testing.assert_close(before.cls, after.cls, rtol=0, atol=10.0 if moves else 1e-12)
        assert moves != torch.allclose(before.cls, after.cls, rtol=0, atol=1e-9)


def test_a_rope_model_has_no_table_and_the_keys_of_one_without_positions():
    with_rope, without = (
        backbones.create("vit_tiny_p16", depth=1, position=position) for position in ("rope", "none")
    )
    assert with_rope.state_dict().keys() == without.state_dict().keys()
    assert "pos_embed" not in with_rope.state_dict()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rope_shift": -0.1}, "rope_shift of vit_tiny_p16 must be 0 or more, not -0.1"),
        ({"rope_jitter": 0.5}, r"rope_jitter of vit_tiny_p16 must be 1 \(off\) or more, not 0.5"),
        ({"rope_rescale": 0.0}, r"rope_rescale of vit_tiny_p16 must be 1 \(off\) or more, not 0.0"),
        ({"rope_base": 0.0}, "rope_base of vit_tiny_p16 must be above 0, not 0.0"),
        ({"embed_dim": 18, "num_heads": 3}, "embed_dim / num_heads of vit_tiny_p16 is 6, no multiple of 4"),
    ],
)
def test_impossible_ranges_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        backbones.create("vit_tiny_p16", position="rope", **options)
