"""What a network has to beat: the pixels themselves, compared as they are.

Shapes used below: B images of a batch, N images of the dataset, S pixels of a side, s <= S after shrinking.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nestling.ssl.evaluation.features import Batches, failing_together, in_dataset_order, untouched

LARGEST = 32  # pixels of a side: 100,000 images of 224 would take 60 GB


def raw_pixels(batches: Batches, num_images: int, size: int, device: torch.device | str = "cpu") -> Tensor:
    """The pixels of each image in [0, 1] as its vector, row i of dataset index i.

    Images of more than `LARGEST` pixels a side are shrunk to that. Whole on the main process,
    (0, 0) on the others.

    Shape:
        batches of (B,), (B, 3, S, S) uint8 -> (N, 3 * s * s) float32 on the CPU
    """
    side = min(size, LARGEST)
    # A process whose share is empty still takes part in the gathering.
    seen, kept = [torch.empty(0, dtype=torch.long)], [torch.empty(0, 3 * side**2, dtype=torch.uint8)]
    with untouched(), failing_together():
        for indices, images in batches:
            small = images.cpu()
            if size > side:
                small = F.interpolate(small, (side, side), mode="bilinear", antialias=True)
            seen.append(indices.cpu())
            kept.append(small.flatten(1))
    pixels = in_dataset_order(torch.cat(seen), {"pixels": torch.cat(kept)}, num_images, device)
    return pixels["pixels"].float().div_(255) if pixels else torch.empty(0, 0)
