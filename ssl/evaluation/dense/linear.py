"""A linear layer on frozen patch tokens that says the class of every pixel (DINOv2, section 7.4).

Shapes used below: B crops, D channels of an h x w grid, K classes, S pixels of a side.
"""

import logging
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.ssl.data.failures import Failure
from nestling.ssl.data.ledger import Ledger
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.dense.crops import Crops
from nestling.ssl.evaluation.dense.grids import enlarged
from nestling.ssl.evaluation.dense.masks import IGNORED
from nestling.ssl.evaluation.dense.settings import Linear
from nestling.ssl.evaluation.dense.sliding import Windows

log = logging.getLogger("nestling")
TOLD = 20  # times that the loss is said


def lr_share(step: int, steps: int, warmup: int) -> float:
    """Share of the peak: a line up over the warm-up times a line down to 0 over all steps.

    mmsegmentation's `poly` of power 1 with linear warm-up, which is multiplied with it.
    """
    return (1 - step / steps) * min(1.0, (step + 1) / (warmup + 1))


def linear_head(dim: int, num_classes: int) -> nn.Sequential:
    """Batch norm, then one 1 x 1 convolution, whose weights begin at standard deviation 0.01."""
    last = nn.Conv2d(dim, num_classes, 1)
    nn.init.normal_(last.weight, std=0.01)
    nn.init.zeros_(last.bias)  # type: ignore[arg-type]
    return nn.Sequential(nn.BatchNorm2d(dim), last)


def train_head(
    batches: Iterable[Crops],
    windows: Windows,
    num_classes: int,
    settings: Linear,
    ledger: Ledger,
    seed: int = 0,
) -> nn.Sequential:
    """Learn the layer on crops; the backbone stays as it is. Returns it in evaluation mode.

    Images that can't be read are entered in `ledger`.

    The scores of a grid are enlarged to the crop, and every pixel counts alike, but for those ignored.

    Raises:
        UserError: what `batches` raise, no image could be read, or the learning rate made it diverge.
    """
    head: nn.Sequential | None = None
    failures: dict[int, Failure] = {}
    for step, crops in enumerate(batches):
        failures |= {failure.image: failure for failure in crops.failures}
        ledger.refuse_above(len(failures))
        if not len(crops.images) or bool((crops.masks == IGNORED).all()):
            continue
        maps = windows.tokens(crops.images)
        if maps[:, 0].numel() < 2:
            raise UserError(
                "linear.batch_size=1: batch norm needs several patches in a batch; raise it, or size"
            )
        if head is None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                head = linear_head(maps.shape[1], num_classes).to(windows.device)
            optimizer = torch.optim.AdamW(head.parameters(), settings.lr, weight_decay=settings.weight_decay)
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * lr_share(step, settings.steps, settings.warmup_steps)
        loss = pixel_loss(head(maps), crops.masks.to(windows.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % max(1, settings.steps // TOLD) == 0:
            log.info("step %d of %d: loss %.4f", step + 1, settings.steps, loss.item())
    if head is None:
        raise UserError("no training image could be read and has a labelled pixel")
    if not all(bool(weights.isfinite().all()) for weights in head.parameters()):
        raise UserError(f"linear.lr={settings.lr}: the layer's weights became infinite; lower it")
    ledger.exchange([*failures.values()])
    return head.eval()


def pixel_loss(scores: Tensor, masks: Tensor) -> Tensor:
    """Cross-entropy of the enlarged scores.

    Shape:
        scores: (B, K, h, w); masks: (B, S, S) uint8 -> ()
    """
    pixels = enlarged(scores, (masks.shape[1], masks.shape[2]))
    return F.cross_entropy(pixels, masks.long(), ignore_index=IGNORED)
