"""Region similarity J and contour accuracy F of DAVIS (Perazzi et al., 2016, section 5).

Shapes used below: H x W pixels.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F

BOUND = 0.008  # of the diagonal: how far apart two contours still match


def region_similarity(predicted: np.ndarray, truth: np.ndarray) -> float:
    """Intersection over union of one object; 1 where it is in neither.

    Shape:
        (H, W) bool each
    """
    union = int((predicted | truth).sum())
    return int((predicted & truth).sum()) / union if union else 1.0


def contour_accuracy(predicted: np.ndarray, truth: np.ndarray) -> float:
    """F-measure of contour pixels that lie within the bound of one of the other contour.

    Precision of a contour that is not there is 1, as is recall; both contours missing gives 1.

    Shape:
        (H, W) bool each
    """
    ours, theirs = contour(predicted), contour(truth)
    radius = math.ceil(BOUND * math.hypot(*truth.shape))
    precision = _share(ours & dilated(theirs, radius), ours)
    recall = _share(theirs & dilated(ours, radius), theirs)
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def contour(mask: np.ndarray) -> np.ndarray:
    """Pixels that differ from the one to the right, below, or below to the right; beyond the edge none does.

    Shape:
        (H, W) bool -> (H, W) bool
    """
    wider = np.pad(mask, ((0, 1), (0, 1)), mode="edge")
    right, below, across = wider[:-1, 1:], wider[1:, :-1], wider[1:, 1:]
    return (mask ^ right) | (mask ^ below) | (mask ^ across)


def dilated(mask: np.ndarray, radius: int) -> np.ndarray:
    """All pixels at most `radius` away from one of the mask: dilation with a disk.

    Shape:
        (H, W) bool -> (H, W) bool
    """
    span = torch.arange(-radius, radius + 1)
    disk = (span[:, None] ** 2 + span**2 <= radius**2).float()
    counts = F.conv2d(torch.from_numpy(mask).float()[None, None], disk[None, None], padding=radius)
    return (counts[0, 0] > 0).numpy()


def _share(matched: np.ndarray, contour: np.ndarray) -> float:
    return float(matched.sum() / contour.sum()) if contour.any() else 1.0
