"""Labels of a video's first frame handed on from frame to frame by the likeness of patches.

The protocol of space-time correspondence (Jabri et al., 2020) with DINO's settings.

Shapes used below: N = h * w patches of a frame, D channels, K labels, S source frames.
"""

from collections import deque
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from nestling.ssl.evaluation.dense.settings import Propagation

AT_ONCE = 1024  # patches that look for their sources together


def propagate(frames: Iterable[Tensor], labels: Tensor, settings: Propagation) -> Iterator[Tensor]:
    """The labels of every frame but the first.

    Sources are the first frame and the `last_frames` before this one. Where frames before have soft labels,
    those are handed on.

    Shape:
        frames: (D, h, w) each, the first one's first; labels: (K, h, w) of the first -> (K, h, w) each
    """
    frames = iter(frames)
    first = F.normalize(next(frames), dim=0), labels
    recent: deque[tuple[Tensor, Tensor]] = deque(maxlen=settings.last_frames)
    for frame in frames:
        target = F.normalize(frame, dim=0)
        sources = [first, *recent]
        found = handed_on(
            target,
            torch.stack([features for features, _ in sources]),
            torch.stack([known for _, known in sources]),
            settings,
        )
        recent.append((target, found))
        yield found


def handed_on(target: Tensor, sources: Tensor, labels: Tensor, settings: Propagation) -> Tensor:
    """Each patch takes the mean label of the `topk` most similar patches near it in all sources.

    Each weighs exp(similarity / temperature); near means at most `radius` rows and columns away, 0 anywhere.

    Shape:
        target: (D, h, w), sources: (S, D, h, w), both of length 1 along D; labels: (S, K, h, w) -> (K, h, w)
    """
    grid = target.shape[1:]
    asking, known = target.flatten(1).T, sources.permute(1, 0, 2, 3).flatten(1)  # N D, D (S N)
    values = labels.permute(0, 2, 3, 1).flatten(0, 2)  # (S N) K
    found = []
    for first in range(0, len(asking), AT_ONCE):
        similarities = asking[first : first + AT_ONCE] @ known
        if settings.radius > 0:
            near = neighbours(grid, settings.radius, first, len(similarities), target.device)
            similarities.masked_fill_(~near.repeat(1, len(sources)), -torch.inf)
        best, places = similarities.topk(min(settings.topk, known.shape[1]))
        weights = (best / settings.temperature).softmax(dim=1)
        found.append((weights[..., None] * values[places]).sum(1))
    return torch.cat(found).T.unflatten(1, grid)


def neighbours(grid: torch.Size, radius: int, first: int, count: int, device: torch.device) -> Tensor:
    """Which patches are near each of `count` patches from `first` on.

    Shape:
        -> (count, N) bool
    """
    place = torch.arange(grid[0] * grid[1], device=device)
    rows, columns = place // grid[1], place % grid[1]
    mine = slice(first, first + count)
    high = (rows[mine, None] - rows).abs() <= radius
    return high & ((columns[mine, None] - columns).abs() <= radius)
