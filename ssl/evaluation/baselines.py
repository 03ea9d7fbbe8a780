"""What a network has to beat: the pixels themselves, compared as they are.

Shapes used below: B images of a batch, n readable images of the dataset,
C channels, S pixels of a side, s <= S after shrinking.
"""

import torch
import torch.nn.functional as F

from nestling.ssl.data.failures import Failure
from nestling.ssl.data.workers import deaths_explained
from nestling.ssl.distributed import failing_together
from nestling.ssl.evaluation.features import Batches, Rows, in_dataset_order, untouched

LARGEST = 32  # pixels of a side: 100,000 images of 224 would take 60 GB


def raw_pixels(
    batches: Batches, num_images: int, size: int, channels: int = 3, device: torch.device | str = "cpu"
) -> Rows:
    """The pixels of each readable image in [0, 1] as its vector, named `pixels`.

    Images of more than `LARGEST` pixels a side are shrunk to that.

    Shape:
        batches of (B,), (B, C, S, S) uint8 -> vectors {"pixels": (n, C * s * s) float32 on the CPU}
    """
    side = min(size, LARGEST)
    # A process whose share is empty still takes part in the gathering.
    seen, kept = [torch.empty(0, dtype=torch.long)], [torch.empty(0, channels * side**2, dtype=torch.uint8)]
    failures: list[Failure] = []
    with untouched(), failing_together(), deaths_explained():
        for indices, images, failed in batches:
            failures += failed
            small = images.cpu()
            if size > side and len(small):
                small = F.interpolate(small, (side, side), mode="bilinear", antialias=True)
            seen.append(indices.cpu())
            kept.append(small.flatten(1) if len(small) else kept[0])
    rows = in_dataset_order(torch.cat(seen), {"pixels": torch.cat(kept)}, failures, num_images, device)
    return rows._replace(vectors={name: pixels.float().div_(255) for name, pixels in rows.vectors.items()})
