"""What a user sets of a linear probe. Nothing here imports torch, so that `--help` answers at once."""

from dataclasses import dataclass

from nestling.ssl.config import key

PROTOCOLS = ("cached", "dino", "logreg")
# DINOv2's grids (Oquab et al., 2023, section 7.1 and its published settings).
RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1)
NUM_C, LOWEST_C, HIGHEST_C = 45, -6, 5  # powers of ten


@dataclass
class Linear:
    """Which heads, and how they learn; the defaults are those of DINO's protocol, over DINOv2's grid."""

    readouts: list[str] | None = key(
        None, "vectors that heads read; null: cls, cls+mean_patch, and both of the last 4 blocks"
    )
    lr: list[float] | None = key(
        None, "learning rates per 256 images of a step; null: 13 from 1e-5 to 0.1", low=1e-12
    )
    c: list[float] | None = key(
        None, "logreg: inverse strengths of the penalty; null: 45 from 1e-6 to 1e5", low=1e-12
    )
    epochs: int = key(100, "passes over the training images; the learning rate falls as a cosine", low=1)
    batch_size: int = key(256, "images of a step, over all processes", low=1)
    momentum: float = key(0.9, "of SGD, without weight decay", low=0, high=0.999)
    scale: list[float] = key(
        [0.08, 1.0], "dino: share of the image's area in a crop, from and to", low=1e-6, high=1, ordered=True
    )
    ratio: list[float] = key(
        [0.75, 4 / 3], "dino: width / height of a crop, from and to", low=0.01, high=100, ordered=True
    )
    flip: float = key(0.5, "dino: probability of a horizontal flip", low=0, high=1)
    max_iterations: int = key(1000, "logreg: of L-BFGS, for each c", low=1)
    tolerance: float = key(
        1e-5, "logreg: largest entry of the gradient at which L-BFGS ends", low=1e-12, high=0.1
    )
    standardise: bool = key(False, "cached, logreg: give features mean 0 and variance 1 while heads learn")
    holdout: float = key(
        0.1,
        "share of each class's training images that the head is chosen on; 0: one head, all images",
        low=0,
        high=0.9,
    )
    refit: bool | None = key(
        None, "train the chosen head anew on all training images; null: yes, but for protocol=dino"
    )
    size: int | None = key(None, "side of the image; null: as the run had it", low=1)
    crop_ratio: float | None = key(
        None, "that side over the resized short side; null: as the run had it", low=0.1, high=1
    )
    images_per_pass: int = key(128, "images that a process puts through the backbone at once", low=1)
    precision: str = key("fp32", "of the backbone; heads are fp32", choices=("fp32", "bf16", "fp16"))
    seed: int = key(0, "of the split, the first weights, the order and the crops", low=0)
