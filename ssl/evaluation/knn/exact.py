"""Exact nearest neighbours by cosine similarity, in bounded memory, the same to the bit whoever finds them.

Features become unit vectors whose entries are multiples of 2^-26 (`unit_rows`). A product of two entries
then has at most 52 binary places, and no sum of products exceeds one by much (Cauchy-Schwarz), so float64
adds them without rounding: every backend, tiling and number of processes gets the same similarities, and
copies of a row tie exactly.

Shapes used below: N training rows, M queries, D channels, k neighbours, R rows of a block.
"""

import logging
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.knn.backends import Nearest, resolved, row_searcher

log = logging.getLogger("nestling")

SPARE = 16  # candidates fetched beyond k, so that rounding and ties at the k-th place can be settled
TILE = 1 << 24  # numbers held at once: 64 MB in float32
SCORED = 1 << 17  # numbers of candidates in float64 at once: 1 MB, near a processor core
ROUNDED = 1 << 10  # rows made unit rows at once
BLOCK = 1 << 14  # training rows that are float32 at once
GRID = 2.0**26
CONSTANT = 1e-6  # below this standard deviation all features point the same way


def search(
    train_features: Tensor, test_features: Tensor, k: int, backend: str = "auto", num_threads: int | None = 1
) -> tuple[Tensor, Tensor]:
    """The k training features of largest cosine similarity to each test feature, ties by smallest index.

    `backend` and `num_threads` as in `backends`. The caller's tensors stay as they are.

    Shape:
        train_features: (N, D), test_features: (M, D) -> similarities (M, k) float32, indices (M, k)

    Raises:
        UserError: non-finite features, unequal D, k outside [1, N], an unknown backend.
    """
    backend = resolved(backend)
    if train_features.shape[1:] != test_features.shape[1:] or train_features.ndim != 2:
        shapes = f"{tuple(train_features.shape)} and {tuple(test_features.shape)}"
        raise UserError(f"k-NN: features of shape {shapes} cannot be compared")
    if not 1 <= k <= len(train_features):
        raise UserError(
            f"k-NN: k={k} of {len(train_features)} training images; give 1 to {len(train_features)}"
        )
    for features, side in ((train_features, "training"), (test_features, "test")):
        _refuse_nonfinite(features, side)
    train, test = unit_rows(train_features), unit_rows(test_features)
    if len(train) > 1 and spread(moments(train)) < CONSTANT:
        log.warning("k-NN: features are constant (std < %g): the network has collapsed", CONSTANT)
    similarities, indices = Exact(train, None, backend, num_threads)(test, None, k)
    return similarities.clamp(-1, 1).float(), indices


def unit_rows(features: Tensor) -> Tensor:
    """A float32 copy on the CPU with rows of length one, to 2^-27 an entry (a zero row stays zero).

    Shape:
        features: (N, D), any float type -> (N, D)
    """
    rows = features.detach().to("cpu", torch.float32)
    made = torch.empty(rows.shape)
    for start in range(0, len(rows), ROUNDED):
        part = F.normalize(rows[start : start + ROUNDED].double(), dim=1, eps=1e-30)
        # float32 holds these multiples; above 1/4 its own steps are as wide or wider.
        made[start : start + ROUNDED] = part.mul_(GRID).round_().div_(GRID)
    return made


def loaded(rows: Tensor) -> Tensor:
    """Unit rows as they were kept, in float32.

    Those of float16 become unit rows again, or rounded lengths would decide between near-parallel ones.

    Shape:
        rows: (…, D) float32 or float16 -> (…, D) float32
    """
    return unit_rows(rows.flatten(0, -2)).view(rows.shape) if rows.dtype == torch.float16 else rows


def moments(rows: Tensor) -> Tensor:
    """Number of rows, sums and sums of squares: those of parts add up.

    Shape:
        rows: (N, D) -> (3, D) float64
    """
    sums = torch.zeros(3, rows.shape[1], dtype=torch.float64)
    sums[0] = len(rows)
    for part in rows.split(ROUNDED):
        exact = part.double()
        sums[1] += exact.sum(0)
        sums[2] += exact.square_().sum(0)
    return sums


def spread(sums: Tensor) -> float:
    """The largest standard deviation of a channel, from `moments`."""
    count, total, squares = sums
    return float((squares / count - (total / count).square()).clamp(min=0).sqrt().max())


def _refuse_nonfinite(features: Tensor, side: str) -> None:
    rows = features.detach().to("cpu", torch.float32)
    if rows.sum().isfinite():  # of all at once first, as it is cheap; a large sum may overflow
        return
    finite = rows.isfinite().all(dim=1)
    if not finite.all():
        bad = (~finite).nonzero().flatten().tolist()
        more = f" and {len(bad) - 10} more" if len(bad) > 10 else ""
        shown = ", ".join(map(str, bad[:10]))
        raise UserError(f"k-NN: {side} features hold NaN or infinity for the images of index {shown}{more}")


class Exact:
    """Finds the nearest of some unit rows, float32 in memory or float16 in a mapped file.

    Candidates come from float32 products, block after block; they are then scored and ordered in
    float64, and where rounding hides which k belong, all rows are. Cost: N * M * D.

    `files (N,)` are numbers that tell rows of one file: a query finds no row of its own, of which there
    are at most `num_own`.
    """

    def __init__(
        self,
        rows: Tensor,
        files: Tensor | None = None,
        backend: str = "torch",
        num_threads: int | None = 1,
        num_own: int = 0,
    ) -> None:
        self.rows, self.files, self.num_own = rows, files, num_own
        self._nearest: Nearest = row_searcher(backend, num_threads)

    def __call__(self, queries: Tensor, files: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
        """The nearest rows of each query, best first, equal ones by smallest place.

        Where there are fewer than k, similarity -inf and place -1 stand in.

        Shape:
            queries: (M, D) unit rows, files: (M,) -> similarities (M, k) float64, places (M, k)
        """
        if not len(self.rows) or not len(queries):
            return nothing(len(queries), k)
        count = min(k + SPARE + self.num_own, len(self.rows))
        places = self._candidates(queries, count)
        similarities, places, gap = settled(self.rows, queries, places, k, self.files, files)
        rounding = math.sqrt(queries.shape[1]) * 2.0**-24  # of a float32 product of unit vectors, about
        unsure = gap <= 2 * rounding
        if count < len(self.rows) and unsure.any():
            own = None if files is None else files[unsure]
            similarities[unsure], places[unsure] = self._all_scored(queries[unsure], own, k)
        return similarities, places

    def _candidates(self, queries: Tensor, count: int) -> Tensor:
        """The best by float32 products.

        Shape:
            queries: (M, D) -> (M, count)
        """
        best = torch.empty(len(queries), 0)
        places = torch.empty(len(queries), 0, dtype=torch.long)
        floor = None
        for start in range(0, len(self.rows), BLOCK):
            block = loaded(self.rows[start : start + BLOCK])
            found, where = self._nearest(block, queries, min(count, len(block)), floor)
            best, places = torch.cat([best, found], dim=1), torch.cat([places, where + start], dim=1)
            if best.shape[1] > count:
                best, order = best.topk(count, dim=1, sorted=False)
                places = places.gather(1, order)
            if best.shape[1] == count:
                floor = best.amin(dim=1)
        return places

    def _all_scored(self, queries: Tensor, files: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
        """The same from all similarities in float64.

        Shape:
            queries: (M, D), files: (M,) -> (M, k), (M, k)
        """
        found = []
        step = max(1, TILE // BLOCK)
        for first in range(0, len(queries), step):
            part = queries[first : first + step].double()
            best = torch.empty(len(part), 0, dtype=torch.float64)
            places = torch.empty(len(part), 0, dtype=torch.long)
            for start in range(0, len(self.rows), BLOCK):
                every = part @ loaded(self.rows[start : start + BLOCK]).double().mT  # m R
                where = torch.arange(start, start + every.shape[1])
                if files is not None and self.files is not None:
                    own = files[first : first + step, None] == self.files[where]
                    every.masked_fill_(own, -torch.inf)
                best = torch.cat([best, every], dim=1)
                places = torch.cat([places, where.expand(len(part), -1)], dim=1)
                best, places = _first_k(best, places, k)
            found.append(ordered(best, places, k))
        return torch.cat([part for part, _ in found]), torch.cat([part for _, part in found])


def settled(
    rows: Tensor, queries: Tensor, places: Tensor, k: int, files: Tensor | None, of_queries: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Candidates scored and ordered in float64, without those of a query's own file and those of place -1.

    Also by how much the k-th of each query is nearer than its furthest candidate.

    Shape:
        rows: (N, D), queries: (M, D), places: (M, c) -> (M, k), (M, k), (M,)
    """
    found = []
    step = max(1, TILE // (places.shape[1] * queries.shape[1]))
    for first in range(0, len(queries), step):
        part = places[first : first + step]
        inside = part.clamp(min=0)
        exact = _scored(rows, queries[first : first + step], inside)
        furthest = exact.min(dim=1).values
        exact.masked_fill_(part < 0, -torch.inf)
        if files is not None and of_queries is not None:
            exact.masked_fill_(files[inside] == of_queries[first : first + step, None], -torch.inf)
        similarities, best = ordered(exact, part, k)
        found.append((similarities, best, similarities[:, -1] - furthest))
    similarity, place, gap = (torch.cat(parts) for parts in zip(*found, strict=True))
    return similarity, place, gap


def _scored(rows: Tensor, queries: Tensor, places: Tensor) -> Tensor:
    """Similarities to each query's candidates, few queries at once.

    Shape:
        rows: (N, D), queries: (M, D), places: (M, c) -> (M, c) float64
    """
    step = max(1, SCORED // (places.shape[1] * queries.shape[1]))
    found = []
    for query, place in zip(queries.double().split(step), places.split(step), strict=True):
        chosen = loaded(rows.index_select(0, place.flatten())).double()  # m*c D
        found.append((chosen.unflatten(0, place.shape) @ query[..., None]).squeeze(-1))
    return torch.cat(found)


def ordered(similarities: Tensor, places: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest, equal ones by smallest place; -inf and -1 where there are fewer, and instead of -inf.

    Shape:
        similarities, places: (M, c) -> (M, k), (M, k)
    """
    places, order = places.sort(dim=1)
    best = similarities.gather(1, order).sort(dim=1, descending=True, stable=True)
    values, where = best.values[:, :k], places.gather(1, best.indices[:, :k])
    short = k - values.shape[1]
    values, where = F.pad(values, (0, short), value=-torch.inf), F.pad(where, (0, short), value=-1)
    return values, where.masked_fill(values == -torch.inf, -1)


def _first_k(similarities: Tensor, places: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest in the order they have, of equal ones the first.

    Shape:
        similarities, places: (M, c) -> (M, min(k, c)), the same
    """
    k = min(k, similarities.shape[1])
    last = similarities.topk(k, dim=1).values[:, -1:]
    above, equal = similarities > last, similarities == last
    room = k - above.sum(dim=1, keepdim=True)
    chosen = (above | (equal & (equal.cumsum(dim=1) <= room))).nonzero()[:, 1].view(-1, k)
    return similarities.gather(1, chosen), places.gather(1, chosen)


def nothing(num_queries: int, k: int) -> tuple[Tensor, Tensor]:
    """What is found where there is nothing.

    Shape:
        (M, k) of -inf, (M, k) of -1
    """
    missing = torch.full((num_queries, k), -1)
    return torch.full((num_queries, k), -torch.inf, dtype=torch.float64), missing
