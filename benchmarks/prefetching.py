"""The next batch on its way to the GPU while it computes, beside a copy when the batch is due.

    python benchmarks/prefetching.py [--threads 1] [--quick] [--json FILE] [--device cuda]

Without a GPU there is nothing to compare: batches stay where they are.
"""

from collections.abc import Iterator

import torch
from side_by_side import Case, main

from nestling.ssl.data.loader import Batch
from nestling.ssl.data.prefetch import Prefetched, prefetched

SIDE = 4096  # of the matrices whose products stand for the work on a batch


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Steps on pinned batches of 2 x 224 + 8 x 96 views; nothing on a CPU."""
    if device.type != "cuda":
        return
    batches = pinned_batches(count=4 if quick else 16, images=64 if quick else 256)
    weights = torch.randn(SIDE, SIDE, device=device)

    def ahead() -> torch.Tensor:
        return stepped(prefetched(iter(batches), device), weights)

    def when_due() -> torch.Tensor:
        copied = (batch.to(device) for batch in batches)
        return stepped(Prefetched(copied, transfer=None), weights)

    def check() -> None:
        if not torch.equal(ahead(), when_due()):
            raise RuntimeError("batches that were sent ahead arrive with other bytes")

    yield Case("batches sent ahead", "copied when due", ahead, when_due, check, rounds=3 if quick else 15)


def pinned_batches(count: int, images: int) -> list[Batch]:
    """Batches as the data loader hands them over where a GPU trains."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2 * images, 3, 224, 224), (8 * images, 3, 96, 96)]
    return [
        Batch(
            [
                torch.randint(256, shape, dtype=torch.uint8, generator=generator).pin_memory()
                for shape in shapes
            ],
            torch.arange(images),
            step,
            [],
            0,
        )
        for step in range(count)
    ]


def stepped(batches: Prefetched, weights: torch.Tensor) -> torch.Tensor:
    """Work after each batch has arrived; the sum of its bytes, (number of batches,) int64."""
    sums = []
    for batch in batches:
        product = weights
        for _ in range(8):
            product = weights @ product
        sums.append(sum(view.sum(dtype=torch.int64) for view in batch.views) + 0 * product[0, 0].long())
        batches.fetch()
    return torch.stack(sums)


if __name__ == "__main__":
    main(cases, __doc__)
