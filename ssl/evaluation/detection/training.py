"""The loop of a detector: an epoch of steps, then average precision on the judged images."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor
from torchmetrics.detection import MeanAveragePrecision
from torchvision.models.detection import MaskRCNN

from nestling.ssl.data.ledger import Ledger
from nestling.ssl.data.order import epoch_order
from nestling.ssl.data.workers import end, following, loader_of, started
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.detection.coco import JUDGED, CocoInstances, InstanceBatch, Ref, Sample
from nestling.ssl.evaluation.detection.settings import FineTuneDetection
from nestling.ssl.evaluation.features import untouched
from nestling.ssl.evaluation.finetuning.layers import apply
from nestling.ssl.evaluation.finetuning.state import State
from nestling.ssl.schedules import warmup_cosine_at
from nestling.ssl.training import seed_step

KINDS = {"bbox": "box", "segm": "mask"}
IS_MASK = 0.5  # probability from which a pixel belongs to an instance, as torchvision's references take it


@dataclass
class DetectorTrainer:
    """Trains `network` on `train` and judges it on `val`."""

    settings: FineTuneDetection
    network: MaskRCNN
    train: CocoInstances
    val: CocoInstances
    state: State
    ledger: Ledger
    accelerator: Accelerator
    num_workers: int

    def __post_init__(self) -> None:
        size = self.settings.train.batch_size
        self.steps = len(self.train) // size
        if not self.steps:
            raise UserError(
                f"{len(self.train)} training images don't fill one step of train.batch_size={size}; lower it"
            )

    def epochs(self) -> Iterator[dict[str, float]]:
        """Train the epochs that are left; after each, its record: losses, learning rate and precisions.

        Raises:
            UserError: the loss is no longer finite, or too many images can't be read.
        """
        for epoch in range(self.state.epoch, self.settings.train.epochs):
            record: dict[str, float] = {"epoch": epoch + 1, "step": (epoch + 1) * self.steps}
            record |= self._train(epoch) | {"lr": self._lr((epoch + 1) * self.steps - 1)}
            yield record | {f"val/{name}": value for name, value in self.precision().items()}

    def _train(self, epoch: int) -> dict[str, float]:
        """One epoch; returns the mean of each loss, and of their sum as `loss`."""
        settings, size = self.settings, self.settings.train.batch_size
        order = epoch_order(len(self.train), settings.seed, epoch)[: self.steps * size].tolist()
        refs = [(index, epoch) for index in order]
        totals: dict[str, Tensor] = {}
        self.network.train()
        for number, batch in enumerate(self._batches(self.train, refs)):
            step = epoch * self.steps + number
            seed_step(settings.seed, step, 0)  # of sizes, sampled boxes and drop path
            if not batch.samples:
                continue
            for name, loss in self._step(step, batch.samples).items():
                totals[name] = totals.get(name, 0) + loss.detach() / self.steps
        total = sum(totals.values(), torch.zeros(()))
        if not torch.isfinite(total):
            raise UserError(
                f"the loss of epoch {epoch + 1} is no longer finite; lower optim.lr={settings.optim.lr}"
            )
        return {"loss": float(total), **{name: float(value) for name, value in totals.items()}}

    def _step(self, step: int, samples: list[Sample]) -> dict[str, Tensor]:
        """One step; returns its losses."""
        optim, device = self.settings.optim, self.accelerator.device
        images = [sample.image.to(device).float().div_(255) for sample in samples]
        targets = [{name: value.to(device) for name, value in sample.target.items()} for sample in samples]
        apply(self.state.optimizer.param_groups, self._lr(step), optim.weight_decay)
        losses: dict[str, Tensor] = self.network(images, targets)
        torch.stack(list(losses.values())).sum().backward()
        if optim.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), optim.clip)
        self.state.optimizer.step()
        self.state.optimizer.zero_grad()
        return losses

    def _lr(self, step: int) -> float:
        optim, total = self.settings.optim, self.settings.train.epochs * self.steps
        return warmup_cosine_at(step, total, min(optim.warmup_steps, total), optim.lr, optim.lr_end)

    def precision(self) -> dict[str, float]:
        """COCO's average precisions of boxes and masks, such as `box/map`, `box/map_50` and `mask/map`.

        What the images can't tell, as the precision of large objects where there are none, is left out.
        """
        metric = MeanAveragePrecision(iou_type=("bbox", "segm"), backend="pycocotools")
        device = self.accelerator.device
        failures = []
        with untouched(self.network), torch.no_grad():
            self.network.eval()
            for batch in self._batches(self.val, [(index, JUDGED) for index in range(len(self.val))]):
                failures += batch.failures
                if not batch.samples:
                    continue
                found = self.network([sample.image.to(device).float().div_(255) for sample in batch.samples])
                metric.update([_detections(item) for item in found], [item.target for item in batch.samples])
        self.ledger.exchange(failures)
        computed = metric.compute()
        return {
            f"{KINDS[kind]}/{name}": float(value)
            for kind in KINDS
            for key, value in computed.items()
            if (name := key.removeprefix(f"{kind}_")) != key and value.numel() == 1 and value >= 0
            if not name.endswith("per_class")
        }

    def _batches(self, source: CocoInstances, refs: list[Ref]) -> Iterator[InstanceBatch]:
        size = self.settings.train.batch_size
        lists = [refs[start : start + size] for start in range(0, len(refs), size)]
        iterator = started(loader_of(source, lists, self.num_workers, None))
        try:
            for _ in lists:
                batch = following(iterator)
                if isinstance(batch, UserError):
                    raise batch
                if source is self.train:
                    self.ledger.exchange(batch.failures)
                yield batch
        finally:
            end(iterator)


def _detections(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """As the metric takes them. Shape: masks (n, 1, H, W) probabilities -> (n, H, W) bool."""
    return {
        "boxes": found["boxes"].cpu(),
        "labels": found["labels"].cpu(),
        "scores": found["scores"].cpu(),
        "masks": (found["masks"][:, 0] > IS_MASK).cpu(),
    }
