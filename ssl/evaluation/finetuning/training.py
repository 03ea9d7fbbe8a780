"""The loop of a fine-tuning: an epoch of steps, then each judged image once.

Shapes used below: B images, C channels, S pixels of a side, K classes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from nestling.ssl.config import Config
from nestling.ssl.data.channels import normalisation
from nestling.ssl.data.failures import Failure
from nestling.ssl.data.ledger import Ledger
from nestling.ssl.data.loader import EvalLoader
from nestling.ssl.data.sources.base import ImageSource
from nestling.ssl.data.workers import deaths_explained, default_workers
from nestling.ssl.distributed import average, failing_together, is_main
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.features import in_dataset_order, untouched
from nestling.ssl.evaluation.finetuning.data import (
    Labelled,
    Mixing,
    Sets,
    TrainingView,
    filled,
    order_of,
    steps_per_epoch,
)
from nestling.ssl.evaluation.finetuning.layers import apply
from nestling.ssl.evaluation.finetuning.settings import FineTune
from nestling.ssl.evaluation.finetuning.state import State
from nestling.ssl.schedules import peak_learning_rate, warmup_cosine_at
from nestling.ssl.training import seed_step
from nestling.ssl.views.evaluation import Centre, View
from nestling.ssl.views.render import normalize

TOPS = (1, 5)


@dataclass
class Trainer:
    """Trains `network` on `sets`; `config` says how images are read, `size` and `crop_ratio` how seen.

    `wrapped` is the network as accelerate prepared it, `optimizer` as well.
    """

    settings: FineTune
    config: Config
    sets: Sets
    size: int
    crop_ratio: float
    state: State
    wrapped: nn.Module
    optimizer: torch.optim.Optimizer
    ledger: Ledger
    accelerator: Accelerator

    def __post_init__(self) -> None:
        train, processes = self.settings.train, self.accelerator.num_processes
        self.steps = steps_per_epoch(len(self.sets.train.source), train.batch_size, processes)
        self.mean, self.std = normalisation(self.config.data)
        self.mixing = Mixing(self.settings.augment, len(self.sets.class_names))

    def epochs(self) -> Iterator[dict[str, float]]:
        """Train the epochs that are left; after each, its record: loss, learning rate and accuracies.

        Raises:
            UserError: the loss is no longer finite, or too many images can't be read.
        """
        for epoch in range(self.state.epoch, self.settings.train.epochs):
            loss = self._train(epoch)
            statistics = [b for b in self.state.network.buffers() if b.is_floating_point()]
            average(statistics)  # each process has its own of batch norms
            record = {"epoch": epoch + 1, "step": (epoch + 1) * self.steps, "loss": loss}
            record["lr"] = self._lr((epoch + 1) * self.steps - 1)
            for name, part in (("choice", self.sets.choice), ("val", self.sets.val)):
                if part is not None:
                    found = self.accuracy(part)
                    record |= {f"{name}/{top}": value for top, value in found.items()}
            yield record

    def _train(self, epoch: int) -> float:
        """One epoch; returns its mean loss over all processes."""
        settings, process = self.settings, self.accelerator.process_index
        data, source, size = self.config.data, self.sets.train.source, settings.train.batch_size
        length = self.steps * size * self.accelerator.num_processes
        order = order_of(source, settings.seed, epoch, length, data.shuffle_shards)
        fill = tuple(round(255 * value) for value in self.mean)
        view = TrainingView((self.size, self.size), settings.augment, fill, settings.seed, epoch)
        total = torch.zeros((), device=self.accelerator.device)
        failures: list[Failure] = []
        self.wrapped.train()
        with deaths_explained():
            for number, batch in enumerate(self._loader(source, view, size, order)):
                step = epoch * self.steps + number
                seed_step(settings.seed, step, process)  # of mixing and drop path
                failures += batch.failures
                total += self._step(step, *filled(batch, size))
        self.ledger.exchange(failures)
        total /= self.steps
        average([total])
        if not torch.isfinite(total):
            raise UserError(
                f"the loss of epoch {epoch + 1} is no longer finite; lower optim.lr={settings.optim.lr}, or "
                "set train.precision=fp32"
            )
        return float(total)

    def _step(self, step: int, indices: Tensor, images: Tensor) -> Tensor:
        """One step; returns its loss. Shape: indices (B,), images (B, C, S, S) uint8."""
        device, optim = self.accelerator.device, self.settings.optim
        pixels = normalize(images.to(device, non_blocking=True), self.mean, self.std)
        pixels, targets = self.mixing(pixels, self.sets.train.labels[indices].to(device))
        apply(self.state.optimizer.param_groups, self._lr(step), optim.weight_decay)
        with self.accelerator.autocast():
            logits = self.wrapped(pixels)
        smoothing = self.settings.augment.label_smoothing
        loss = F.cross_entropy(logits.float(), targets, label_smoothing=smoothing)
        self.accelerator.backward(loss)
        if optim.clip is not None:
            self.accelerator.clip_grad_norm_(self.wrapped.parameters(), optim.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def _lr(self, step: int) -> float:
        """Of the head at a step, counted from 0."""
        train, optim = self.settings.train, self.settings.optim
        peak = peak_learning_rate(optim.lr, "linear", train.batch_size * self.accelerator.num_processes)
        total, warmup = train.epochs * self.steps, round(optim.warmup_epochs * self.steps)
        return warmup_cosine_at(step, total, min(warmup, total), peak, optim.lr_end)

    def accuracy(self, judged: Labelled) -> dict[str, float]:
        """Shares of the readable images whose class is the first, or in the first five; {} beside the main.

        Every image once over all processes, by its index. Top-5 where there are more than five classes.
        """
        num_images, device = len(judged.source), self.accelerator.device
        kept = min(max(TOPS), len(self.sets.class_names))
        seen, first = [torch.empty(0, dtype=torch.long)], [torch.empty(0, kept, dtype=torch.long)]
        failures: list[Failure] = []
        view = Centre((self.size, self.size), self.crop_ratio)
        network = self.state.network
        with untouched(network), failing_together(), deaths_explained(), torch.no_grad():
            network.eval()
            for batch in self._loader(judged.source, view, self.settings.train.batch_size, None):
                failures += batch.failures
                if not len(batch.indices):
                    continue
                pixels = normalize(batch.images.to(device, non_blocking=True), self.mean, self.std)
                with self.accelerator.autocast():
                    logits = network(pixels)
                seen.append(batch.indices)
                first.append(logits.float().topk(kept).indices.cpu())
        rows = in_dataset_order(torch.cat(seen), {"first": torch.cat(first)}, failures, num_images, device)
        self.ledger.exchange(rows.failures if is_main() else [])
        if not is_main():
            return {}
        right = rows.vectors["first"] == judged.labels[rows.indices, None]
        tops = [top for top in TOPS if top == 1 or len(self.sets.class_names) > top]
        return {f"top{top}": float(right[:, :top].any(1).double().mean()) for top in tops}

    def _loader(
        self, source: ImageSource, view: View, batch_size: int, order: list[int] | None
    ) -> EvalLoader:
        """This process's share of the images."""
        workers = self.config.data.num_workers
        return EvalLoader(
            source,
            self.config.data,
            view,
            batch_size,
            self.accelerator.process_index,
            self.accelerator.num_processes,
            default_workers() if workers is None else workers,
            self.ledger,
            order,
        )
