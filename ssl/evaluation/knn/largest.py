"""The largest numbers of rows, given that few can count: one pass over group maxima, then over few groups.

Shapes used below: M rows, R numbers in a row, c wanted, G = R / GROUP groups of neighbours, w found at most.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32  # numbers, two lines of a processor's cache
MANY = 0.5  # share of the groups from which on plain `topk` is faster and smaller


def largest(numbers: Tensor, count: int, floor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row among those above its floor, in any order; without a floor of all.

    Where fewer are above, -inf or numbers below fill up. Without a floor the maxima of c groups make one, as
    at least c numbers reach the smallest of them.

    Shape:
        numbers: (M, R), R a multiple of GROUP; floor: (M,) -> values (M, w), places (M, w), w <= c
    """
    groups = numbers.unflatten(1, (-1, GROUP))  # M G GROUP
    peaks = groups.amax(2)
    num_rows, num_groups = peaks.shape
    if floor is None and num_groups >= count:
        reached = peaks.kthvalue(num_groups - count + 1, dim=1).values
        floor = reached.nextafter(reached.new_tensor(-torch.inf))
    if floor is None:
        return _topk(numbers, count)
    high = (peaks > floor[:, None]).flatten().nonzero().squeeze(1)
    if len(high) > MANY * peaks.numel():
        return _topk(numbers, count)
    row = high // num_groups
    chosen = groups.flatten(0, 1).index_select(0, high)
    at = (chosen > floor[row, None]).flatten().nonzero().squeeze(1)
    group = at // GROUP
    row, place = row[group], (high[group] % num_groups) * GROUP + at % GROUP
    values, places = packed(chosen.flatten()[at], place, row, num_rows)
    if values.shape[1] <= count:
        return values, places
    values, order = _topk(values, count)
    return values, places.gather(1, order)


def packed(values: Tensor, places: Tensor, row: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """A list by rows as a table, filled up with -inf and place 0.

    Shape:
        values, places, row: (n,), row rising -> (M, w), (M, w)
    """
    found = torch.bincount(row, minlength=num_rows)
    width = int(found.max())
    slot = torch.arange(len(row)) + (torch.arange(num_rows) * width - found.cumsum(0) + found)[row]
    table = values.new_full((num_rows * width,), -torch.inf).index_copy_(0, slot, values)
    where = places.new_zeros(num_rows * width).index_copy_(0, slot, places)
    return table.view(num_rows, width), where.view(num_rows, width)


def _topk(numbers: Tensor, count: int) -> tuple[Tensor, Tensor]:
    best = numbers.topk(min(count, numbers.shape[1]), dim=1, sorted=False)
    return best.values, best.indices


def joined(tables: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Tables of some widths, one below the other.

    Shape:
        [(m, w), (m, w)] -> (M, w), (M, w)
    """
    width = max(values.shape[1] for values, _ in tables)
    values = [F.pad(part, (0, width - part.shape[1]), value=-torch.inf) for part, _ in tables]
    places = [F.pad(part, (0, width - part.shape[1])) for _, part in tables]
    return torch.cat(values), torch.cat(places)
