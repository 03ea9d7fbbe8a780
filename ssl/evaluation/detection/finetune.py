"""The training of one detector from its settings: the parts put together."""

import logging
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from nestling import backbones
from nestling.ssl.command_line import write
from nestling.ssl.data.channels import normalisation
from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.ledger import Ledger
from nestling.ssl.data.workers import default_workers
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.detection import model
from nestling.ssl.evaluation.detection.coco import CocoInstances
from nestling.ssl.evaluation.detection.settings import FineTuneDetection
from nestling.ssl.evaluation.detection.training import DetectorTrainer
from nestling.ssl.evaluation.finetuning.files import FILE
from nestling.ssl.evaluation.finetuning.layers import parameter_groups
from nestling.ssl.evaluation.finetuning.model import facts_of, rebuilt
from nestling.ssl.evaluation.finetuning.settings import drop_path_named
from nestling.ssl.evaluation.finetuning.state import State, claimed, flat
from nestling.ssl.evaluation.results import FOLDER, show_table, write_results
from nestling.ssl.run import processes
from nestling.ssl.run.log import JsonLog
from nestling.ssl.run.progress import console, say_only_here
from nestling.ssl.trained import Trained, load_trained

logger = logging.getLogger("nestling")


def finetune_detection(settings: FineTuneDetection) -> Path:
    """Train Mask R-CNN on the backbone as `settings` say; returns the folder of what came of it.

    Raises:
        UserError: a setting, the images or the folder can't be used, or training fails.
    """
    trained = load_trained(settings.checkpoint, settings.network)
    trainer, facts = prepared(settings, trained)
    out = claimed(settings.out, settings.resume)
    trainer.state.restore(out, trainer.accelerator)
    trainer.state.save(out, trainer.accelerator)  # marks the folder, and proves the disk
    write(settings, out / "config.yaml")
    with ExitStack() as opened:
        log = JsonLog(out / "log.jsonl", trainer.state.epoch * trainer.steps)
        opened.callback(log.close)
        for record in trainer.epochs():
            trainer.state.history.append(record)
            log.write(record)
            model.save(out / FILE, trainer.network, facts)
            trainer.state.save(out, trainer.accelerator)
            console.print(
                f"epoch {record['epoch']}/{settings.train.epochs}  loss {record['loss']:.4f}  "
                f"box AP {record.get('val/box/map', 0):.1%}  mask AP {record.get('val/mask/map', 0):.1%}"
            )
    report(settings, trained, trainer, out)
    trainer.accelerator.end_training()
    return out


def prepared(settings: FineTuneDetection, trained: Trained) -> tuple[DetectorTrainer, dict[str, Any]]:
    """The trainer of a fresh start, and what the file of its detector says."""
    accelerator = processes.join()
    say_only_here(accelerator.is_main_process)
    if accelerator.num_processes > 1:
        raise UserError("finetune_detection trains in one process; start it with python")
    config, data, wanted = trained.config, settings.data, settings.model
    decoder = Decoder.of(config.data)
    train = CocoInstances(data.train, data.train_images, decoder, flip=wanted.flip, seed=settings.seed)
    val = CocoInstances(data.val, data.val_images, decoder, train.names)
    torch.manual_seed(settings.seed)
    pyramid = {"pyramid": True} if config.backbone.name in backbones.names() else {}
    with drop_path_named(wanted.drop_path):
        backbone = rebuilt(trained, wanted.drop_path, **pyramid)
    shape: dict[str, Any] = {name: getattr(wanted, name) for name in model.SHAPE}
    bf16 = processes.resolved_precision(settings.train.precision) == "bf16"
    network = model.mask_rcnn(
        *(backbone, *normalisation(config.data), len(train.names)),
        **shape,
        autocast=torch.bfloat16 if bf16 else None,
    ).to(accelerator.device)
    groups = parameter_groups(network, backbone, settings.optim.layer_decay)
    state = State(network, torch.optim.AdamW(groups, lr=0.0), flat(asdict(settings)))
    ledger = Ledger(data.max_bad_share, len(train) + len(val))
    given = config.data.num_workers if data.num_workers is None else data.num_workers
    workers = default_workers() if given is None else given
    trainer = DetectorTrainer(settings, network, train, val, state, ledger, accelerator, workers)
    logger.info(
        f"{trained.title}, {config.backbone.name}: {len(train)} images of {len(train.names)} classes to "
        f"train on, {len(val)} to judge; {trainer.steps} steps an epoch"
    )
    facts = facts_of(trained, wanted.min_size[-1], 1.0, classes=train.names, **shape)
    facts["backbone"]["options"] |= pyramid
    return trainer, facts


def report(settings: FineTuneDetection, trained: Trained, trainer: DetectorTrainer, out: Path) -> None:
    """Write the results of the last epoch with all that they depend on, and print the table."""
    last = trainer.state.history[-1]
    results = {name.removeprefix("val/"): value for name, value in last.items() if name.startswith("val/")}
    shown = ("map", "map_50", "map_75")
    columns = ["AP of", "AP %", "AP50 %", "AP75 %"]
    rows = [[kind, *(results.get(f"{kind}/{name}", "-") for name in shown)] for kind in ("box", "mask")]
    (out / FOLDER).mkdir(exist_ok=True)
    write_results(
        out / FOLDER / "detection.json",
        trained,
        settings,
        results | {"epoch": last["epoch"]},
        history=trainer.state.history,
        num_train=len(trainer.train),
        num_val=len(trainer.val),
        classes=trainer.train.names,
        unreadable=trainer.ledger.paths(),
    )
    show_table(f"{trained.title}, Mask R-CNN", columns, rows)
