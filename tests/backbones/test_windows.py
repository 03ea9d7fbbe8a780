"""How grids are cut into windows, which tokens of a window see which, and where they read the bias table."""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from nestling.backbones import windows as windows_module
from nestling.backbones.symbolic_windows import SymbolicWindows, cut_grid
from nestling.backbones.window_attention import WindowAttention
from nestling.backbones.windows import (
    attention_mask,
    cut_axis,
    kept,
    relative_position_index,
    token_places,
)

CPU = torch.device("cpu")
GRIDS = [(7, 7), (14, 14), (8, 15), (3, 16), (21, 5), (1, 1), (6, 7), (20, 9)]


@pytest.mark.parametrize(("window", "entries", "full"), [(7, 169, 2401), (14, 729, 38416)])
def test_the_table_is_compact_where_a_full_matrix_would_not_be(window, entries, full):
    table = WindowAttention(4, 2, window).relative_position_bias_table
    index = relative_position_index((window, window), window, CPU)
    assert table.shape == (entries, 2)
    assert index.numel() == full
    assert index.unique().tolist() == list(range(entries))  # every entry is read


def test_the_first_token_of_a_3x3_window_reads_entry_0_0_for_the_last():
    index = relative_position_index((3, 3), 3, CPU)
    assert divmod(index[0, 8].item(), 5) == (0, 0)  # token (0, 0) attends to token (2, 2)
    assert divmod(index[8, 0].item(), 5) == (4, 4)
    assert divmod(index[0, 0].item(), 5) == (2, 2)
    assert divmod(index[1, 6].item(), 5) == (0, 3)  # (0, 1) to (2, 0): two rows up, one column right


@pytest.mark.parametrize("window", [(3, 3), (2, 3), (1, 3), (3, 1)])
def test_a_shrunk_window_reads_the_rows_that_its_offsets_read_in_the_full_one(window):
    full = relative_position_index((3, 3), 3, CPU).view(3, 3, 3, 3)
    expected = full[: window[0], : window[1], : window[0], : window[1]].flatten(2).flatten(0, 1)
    assert torch.equal(relative_position_index(window, 3, CPU), expected)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("grid", GRIDS)
def test_windows_hold_the_tokens_that_padding_then_shifting_puts_there(grid, masked, shifted):
    windows = cut_grid(grid, 7, shifted, masked)
    x = torch.arange(1, grid[0] * grid[1] + 1).view(1, *grid, 1)
    cut = windows.cut(x)
    assert torch.equal(windows.join(cut), x)
    row, column = token_places(windows, CPU)
    found = cut.squeeze().reshape(-1) if cut.numel() == 1 else cut[0, ..., 0].transpose(1, 2).reshape(-1)
    inside = (row < grid[0]) & (column < grid[1])
    expected = torch.where(inside, row * grid[1] + column + 1, 0)
    assert torch.equal(found, expected.flatten())
    shift = [windows.rows.shift, windows.columns.shift]
    assert (row[0, 0].item(), column[0, 0].item()) == tuple(shift)


@pytest.mark.parametrize(
    ("length", "shrink", "expected"),
    [
        (21, True, (7, 3, 3)),
        (20, True, (7, 3, 3)),
        (8, True, (7, 2, 3)),
        (7, True, (7, 1, 0)),
        (5, True, (5, 1, 0)),
        (5, False, (7, 1, 0)),
        (1, True, (1, 1, 0)),
    ],
)
def test_an_axis_within_one_window_is_not_shifted_and_shrinks_it_only_with_masked_padding(
    length, shrink, expected
):
    assert cut_axis(length, 7, shifted=True, shrink=shrink)[1:] == expected
    assert cut_axis(length, 7, shifted=False, shrink=shrink)[1:] == (*expected[:2], 0)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("grid", [(6, 6), (5, 7), (2, 4), (9, 3)])
def test_the_mask_lets_real_tokens_see_the_real_tokens_of_their_own_part(grid, masked):
    windows = cut_grid(grid, 3, True, masked)
    mask, (row, column) = attention_mask(windows, CPU), token_places(windows, CPU)
    places = torch.stack([row, column], dim=-1)
    for window in range(len(places)):
        for query, (y, x) in enumerate(places[window].tolist()):
            for key, (other_y, other_x) in enumerate(places[window].tolist()):
                # tokens less than a window apart on the grid were next to each other before the shift
                same_part = abs(y - other_y) < 3 and abs(x - other_x) < 3
                is_real, other_is_real = y < grid[0] and x < grid[1], other_y < grid[0] and other_x < grid[1]
                sees = same_part and (not masked or other_is_real or not is_real)
                assert mask[window, query, key].item() == sees
    assert mask.any(-1).all()  # no softmax over nothing


@torch.no_grad()
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("grid", GRIDS)
def test_the_windows_of_exported_graphs_give_the_same_numbers(grid, relative, masked, shifted):
    torch.manual_seed(0)
    layer = WindowAttention(8, 2, 7, shifted, masked, relative).double()
    x = torch.randn(2, *grid, 8).double()
    rows, columns = (cut_axis(length, 7, shifted, shrink=False) for length in grid)
    windows = SymbolicWindows(rows, columns, masked, spare=1)
    torch.testing.assert_close(layer.within(windows, x), layer(x), rtol=0, atol=1e-12)


def test_a_second_forward_builds_no_mask_and_no_index():
    layer, x = WindowAttention(8, 2, 7, shifted=True), torch.randn(1, 17, 23, 8)
    layer(x)
    before = windows_module._kept.cache_info()
    layer(x + 1)
    WindowAttention(8, 4, 7, shifted=True)(x)  # another layer of the same window
    after = windows_module._kept.cache_info()
    assert (after.misses, after.hits) == (before.misses, before.hits + 8)
    layer(x[:, :16])
    assert windows_module._kept.cache_info().misses == after.misses + 3  # mask and orders


def test_what_was_built_in_inference_mode_serves_in_training():
    layer = WindowAttention(8, 2, 5, shifted=True)
    windows_module._kept.cache_clear()
    with torch.inference_mode():
        layer(torch.randn(1, 12, 12, 8))
    layer(torch.randn(1, 12, 12, 8)).sum().backward()
    assert layer.relative_position_bias_table.grad.isfinite().all()


@pytest.mark.filterwarnings(r"ignore:.*torch\.jit\..* is (deprecated|not supported)")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_tensors_without_numbers_are_never_kept_nor_mixed_with_those_that_are():
    layer, x = WindowAttention(8, 2, 6, shifted=True), torch.randn(1, 13, 13, 8)
    before = windows_module._kept.cache_info().currsize
    assert copy.deepcopy(layer).to("meta")(x.to("meta")).shape == x.shape

    def fake_forward() -> torch.Tensor:
        with FakeTensorMode() as mode:  # refuses to mix fake tensors with real ones
            state = {key: mode.from_tensor(p) for key, p in layer.named_parameters()}
            return functional_call(layer, state, (mode.from_tensor(x),))

    assert fake_forward().shape == x.shape
    torch.func.grad(lambda x: layer(x).sum())(x)
    torch.jit.trace(layer, x, check_trace=False)  # a kept tensor would be a constant of the next graph
    assert windows_module._kept.cache_info().currsize == before
    expected = layer(x)  # now mask and index are kept
    assert fake_forward().shape == x.shape
    assert torch.equal(layer(x), expected)


def test_the_cache_is_bounded():
    for length in range(1, 200):
        kept(torch.empty(0), relative_position_index, (1, length), length)
    info = windows_module._kept.cache_info()
    assert info.currsize == info.maxsize == 128
