"""One fine-tuning from its settings: the parts put together."""

import logging
import warnings
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs

from nestling.ssl.command_line import write
from nestling.ssl.config import Config
from nestling.ssl.data.channels import channels
from nestling.ssl.data.ledger import Ledger
from nestling.ssl.data.sources.opening import opened_together
from nestling.ssl.distributed import everyones, failing_together
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.finetuning import model
from nestling.ssl.evaluation.finetuning.data import refuse_colors, sets_of
from nestling.ssl.evaluation.finetuning.files import FILE
from nestling.ssl.evaluation.finetuning.layers import parameter_groups
from nestling.ssl.evaluation.finetuning.settings import FineTune, drop_path_named
from nestling.ssl.evaluation.finetuning.state import State, claimed, flat
from nestling.ssl.evaluation.finetuning.training import Trainer
from nestling.ssl.evaluation.results import FOLDER, show_table, write_results
from nestling.ssl.evaluation.settings import override
from nestling.ssl.names import printable
from nestling.ssl.run import processes
from nestling.ssl.run.loading import check_size
from nestling.ssl.run.log import JsonLog
from nestling.ssl.run.progress import console, say_only_here
from nestling.ssl.trained import Trained, load_trained

logger = logging.getLogger("nestling")


def finetune(settings: FineTune) -> Path:
    """Train backbone and classifier as `settings` say; returns the folder of what came of it.

    Every process of a launcher calls this alike.

    Raises:
        UserError: a setting, the images or the folder can't be used, or training fails.
    """
    trained = load_trained(settings.checkpoint, settings.network)
    override(trained.config, "data", settings.data)
    trained.refuse_nowhere()
    trainer, facts = prepared(settings, trained)
    out, accelerator = Path(settings.out).expanduser(), trainer.accelerator
    with failing_together():
        if accelerator.is_main_process:
            claimed(settings.out, settings.resume)
    trainer.state.restore(out, accelerator)
    if len(set(everyones([trainer.state.epoch]))) > 1:  # waits for all, before the file is written anew
        raise UserError(f"out={printable(out)} must lie on a disk that all machines share, to go on with")
    with ExitStack() as opened, processes.gone_explained():
        log = None
        with failing_together():
            if accelerator.is_main_process:
                trainer.state.save(out, accelerator)  # marks the folder, and proves the disk
                write(settings, out / "config.yaml")
                log = JsonLog(out / "log.jsonl", trainer.state.epoch * trainer.steps)
                opened.callback(log.close)
        for record in trainer.epochs():
            trainer.state.history.append(record)
            with failing_together():
                if log is not None:
                    log.write(record)
                    keep(trainer, out, facts)
    if accelerator.is_main_process:
        report(settings, trained, trainer, out)
    accelerator.end_training()
    return out


def prepared(settings: FineTune, trained: Trained) -> tuple[Trainer, dict[str, Any]]:
    """The trainer of a fresh start, and what the file of its network says."""
    size = settings.augment.size or trained.size
    crop_ratio = settings.augment.crop_ratio or trained.config.knn.crop_ratio
    check_size(trained.backbone, size, "augment.size")
    refuse_colors(settings.augment, channels(trained.config.data))
    accelerator = joined(settings.train.precision)
    say_only_here(accelerator.is_main_process)
    sets = sets_of(*opened_together(trained.config), settings.train.choose_on_train, settings.seed)
    torch.manual_seed(settings.seed)
    with drop_path_named(settings.model.drop_path):
        network = model.classifier(
            *(trained, settings.model.readout, settings.model.drop_path, size, len(sets.class_names))
        ).to(accelerator.device)
    processes.synchronise_batch_norms(network, accelerator)
    groups = parameter_groups(network, network.backbone, settings.optim.layer_decay)
    optimizer = torch.optim.AdamW(groups, lr=0.0, fused=accelerator.scaler is None)
    global_batch = settings.train.batch_size * accelerator.num_processes
    state = State(network, optimizer, {**flat(asdict(settings)), "global batch": global_batch})
    wrapped, stepped = accelerator.prepare(network, optimizer)
    num_images = sum(len(part.source) for part in (sets.train, sets.choice, sets.val) if part is not None)
    ledger = Ledger(trained.config.data.max_bad_share, num_images)
    trainer = Trainer(
        *(settings, trained.config, sets, size, crop_ratio, state, wrapped, stepped, ledger, accelerator)
    )
    announce(trainer, trained, trained.config)
    head = {"readout": settings.model.readout, "classes": sets.class_names}
    return trainer, model.facts_of(trained, size, crop_ratio, **head)


def joined(precision: str) -> Accelerator:
    """The processes that were started, in that precision; what torch says without need is kept quiet.

    Running statistics are averaged after each epoch, so DDP need not broadcast those of process 0.
    """
    for message, category in processes.HARMLESS.items():
        warnings.filterwarnings("ignore", message, category)
    found = processes.resolved_precision(precision)
    own_statistics = DistributedDataParallelKwargs(broadcast_buffers=False)
    return processes.join([own_statistics], mixed_precision="no" if found == "fp32" else found)


def announce(trainer: Trainer, trained: Trained, config: Config) -> None:
    """The first line: what is trained on what."""
    sets, held = trainer.sets, trainer.sets.choice
    chosen = f", {len(held.source)} choose the epoch" if held is not None else ""
    logger.info(
        f"{trained.title}, {config.backbone.name}: {len(sets.train.source)} images of "
        f"{len(sets.class_names)} classes to train on{chosen}, {len(sets.val.source)} to judge; "
        f"steps per epoch: {trainer.steps}"
    )
    warmup, epochs = trainer.settings.optim.warmup_epochs, trainer.settings.train.epochs
    if warmup >= epochs:
        logger.warning(
            f"optim.warmup_epochs={warmup:g} leaves nothing of train.epochs={epochs} to learn at the full "
            "rate: lower it"
        )


def keep(trainer: Trainer, out: Path, facts: dict[str, Any]) -> None:
    """Save the network of the epoch that counts so far, then where training stands."""
    history, network = trainer.state.history, trainer.state.network
    if chosen(history) == history[-1]:
        model.save(out / FILE, network, facts)
    trainer.state.save(out, trainer.accelerator)
    last = history[-1]
    console.print(
        f"epoch {last['epoch']}/{trainer.settings.train.epochs}  loss {last['loss']:.4f}  "
        f"top-1 {last['val/top1']:.1%}  lr {last['lr']:.2e}"
    )


def chosen(history: list[dict[str, float]]) -> dict[str, float]:
    """The first epoch that is best on the images that choose, else the last one: never by the judged ones."""
    if "choice/top1" not in history[-1]:
        return history[-1]
    return max(history, key=lambda record: record["choice/top1"])


def report(settings: FineTune, trained: Trained, trainer: Trainer, out: Path) -> None:
    """Write the results with all that they depend on, and print the table."""
    history = trainer.state.history
    counted, sets = chosen(history), trainer.sets
    tops = [name for name in counted if name.startswith("val/")]
    (out / FOLDER).mkdir(exist_ok=True)
    row = [counted["epoch"], *(counted[name] for name in tops)]
    columns = ["epoch", *(name.removeprefix("val/").replace("top", "top-") + " %" for name in tops)]
    write_results(
        out / FOLDER / "finetune.json",
        trained,
        settings,
        {name.removeprefix("val/"): counted[name] for name in tops} | {"epoch": counted["epoch"]},
        history=history,
        num_train=len(sets.train.source),
        num_choice=0 if sets.choice is None else len(sets.choice.source),
        num_val=len(sets.val.source),
        num_classes=len(sets.class_names),
        size=trainer.size,
        unreadable=trainer.ledger.paths(),
    )
    show_table(f"{trained.title}, fine-tuned", columns, [row])
