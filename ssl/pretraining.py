"""One pretraining run from its config: the parts of a recipe put together."""

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch
from accelerate import Accelerator

from nestling.backbones import Backbone
from nestling.backbones.weights import Weights
from nestling.ssl import compiling
from nestling.ssl.batch_size import with_batch_size
from nestling.ssl.config import Config
from nestling.ssl.data.ledger import Ledger
from nestling.ssl.data.loader import TrainLoader
from nestling.ssl.data.order import course_of
from nestling.ssl.data.sources.base import ImageSource
from nestling.ssl.data.sources.opening import EMBEDDED, TORCHVISION, opened_together
from nestling.ssl.data.survey import say_if_not_compiled, warn_of_shallow, warn_of_small
from nestling.ssl.distillation import SelfDistillation
from nestling.ssl.distributed import failing_together
from nestling.ssl.errors import Stopped, UserError
from nestling.ssl.evaluation.online import OnlineKnn
from nestling.ssl.evaluation.unlabelled.judge import UnlabelledJudge
from nestling.ssl.initial_weights import settled, start_from
from nestling.ssl.names import printable
from nestling.ssl.run import changes, checkpoints, lock, processes, sharding
from nestling.ssl.run.disk import refuse_small
from nestling.ssl.run.guards import try_a_step
from nestling.ssl.run.memory import AT_THE_START, IN_EVALUATION, IN_TRAINING, running_out_explained
from nestling.ssl.run.progress import say_only_here
from nestling.ssl.run.results import show
from nestling.ssl.run.run import Run
from nestling.ssl.run.stopping import Stopping, reason
from nestling.ssl.schedules import Schedules
from nestling.ssl.training import train
from nestling.ssl.validation import validate

logger = logging.getLogger("nestling")


@lock.let_go_at_the_end()
@processes.gone_explained()
def pretrain(config: Config) -> Path:
    """Pretrain a backbone as `config` says and show what it learned; returns the run directory.

    Every process of a launcher calls this alike. All that can be refused is refused before the
    first step, the run directory being touched last.

    Raises:
        UserError: a setting, the images or the run directory can't be used, or another process is gone.
        Stopped: a signal or the time limit ended it early, its last step being saved.
    """
    stopping = Stopping(config.train.max_hours)
    config = with_absolute_paths(config)
    config, weights = settled(config)
    validate(config)
    accelerator = processes.start(config)
    say_only_here(accelerator.is_main_process)
    compiling.refuse_where_impossible(config, accelerator.device)
    images, queries = opened_together(config)
    config = with_batch_size(config, accelerator, len(images))
    place = (accelerator.process_index, accelerator.num_processes)
    course = course_of(len(images), config, accelerator.num_processes)
    ledger = Ledger(config.data.max_bad_share, len(images) + (len(queries) if queries is not None else 0))
    judges = Judges(images, queries, config, accelerator, ledger)
    method = networks(config, weights, accelerator)
    with failing_together():
        if accelerator.is_main_process:
            refuse_small(config, method)
    run = Run(config, accelerator, course, judges.unlabelled.kept if judges.unlabelled else None)
    schedules = Schedules(config, run.course)
    announce(config, accelerator, schedules, images, queries)
    judges.announce()
    if accelerator.is_main_process:
        say_if_not_compiled()
        warn_of_small(images, config)
        warn_of_shallow(config)

    def batches_from(step: int) -> TrainLoader:
        return TrainLoader(images, config, schedules.num_steps, *place, start_step=step, course=run.course)

    with stopping.listening(), running_out_explained(config, IN_TRAINING), compiling.explained(config):
        code = train(
            *(method, batches_from, schedules, run, judges.judge if judges else None, ledger, images.path),
            *(stopping, accelerator),
        )
        if code:
            leave(run, config, accelerator, code)
    with running_out_explained(config, IN_EVALUATION), compiling.eagerly(config):
        backbone = sharding.whole_backbone(method.teacher.backbone, config)
        show(run.path, backbone, judges.knn, queries or images, config, accelerator)
    accelerator.end_training()
    return run.path


def networks(config: Config, weights: Weights | None, accelerator: Accelerator) -> SelfDistillation:
    """Student, teacher and terms on the device of this process, tried with one step.

    Raises:
        UserError: the weights don't fit, no step can be taken, or memory ran out.
    """
    with running_out_explained(config, AT_THE_START):
        torch.manual_seed(config.seed)  # alike on all processes: the teacher is never broadcast
        method = SelfDistillation(config).to(accelerator.device)
        if weights is not None:
            start_from(method, weights, config)
        processes.synchronise_batch_norms(method, accelerator)
        try_a_step(method, config, processes.autocast_dtype(accelerator))
        compiling.compile_blocks(method, config)
    return method


class Judges:
    """What rates the teacher while it learns: k-NN where there are labels, its features where there are none.

    `judge` is called by all processes together; k-NN comes first, where it is. False where nothing judges.
    """

    def __init__(
        self,
        images: ImageSource,
        queries: ImageSource | None,
        config: Config,
        accelerator: Accelerator,
        ledger: Ledger,
    ) -> None:
        self._config, self._accelerator = config, accelerator
        self.knn: OnlineKnn | None = None
        self.unlabelled: UnlabelledJudge | None = None
        place = (accelerator.process_index, accelerator.num_processes)
        if queries is not None and config.knn.every:
            self.knn = OnlineKnn(images, queries, config, *place, ledger=ledger)
        wanted = self.knn is None if config.knn.unlabelled is None else config.knn.unlabelled
        if config.knn.every and wanted:
            self.unlabelled = UnlabelledJudge(queries or images, config, *place, ledger=ledger)

    def __bool__(self) -> bool:
        return self.knn is not None or self.unlabelled is not None

    def announce(self) -> None:
        """Say what is judged without labels."""
        if self.unlabelled is not None:
            logger.info(self.unlabelled.said())

    def judge(self, backbone: Backbone, only_compared: bool) -> dict[str, float]:
        """All numbers of a backbone by name, or only those for what the next time compares with."""
        found: dict[str, float] = {}
        with running_out_explained(self._config, IN_EVALUATION), compiling.eagerly(self._config):
            backbone = sharding.whole_backbone(backbone, self._config)
            autocast = processes.autocast_dtype(self._accelerator)
            for judge in (None if only_compared else self.knn, self.unlabelled):
                if judge is not None:
                    found |= judge.judge(backbone, self._accelerator.device, autocast)
        return found


def leave(run: Run, config: Config, accelerator: Accelerator, code: int) -> NoReturn:
    """Say why the run stops and how it goes on; all processes leave together, as what is left is saved."""
    saved = checkpoints.pointed(run.path, checkpoints.LAST)
    name = saved.name if saved is not None else "no checkpoint"
    message = (
        f"stopped: {reason(code, config.train.max_hours)}; {name} is saved in {printable(run.path)}, and "
        f"the same command with resume=auto goes on from there (exit code {code})"
    )
    logger.info(message)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    raise Stopped(message, code)


def with_absolute_paths(config: Config) -> Config:
    """The same with paths that can be followed from anywhere, as a checkpoint records them."""
    data = config.data
    val, root, cache, init_from = (
        None if path is None else absolute(path)
        for path in (data.val, data.root, data.cache, config.init_from)
    )
    if config.init_from is not None and "://" in config.init_from:
        raise UserError(f"init_from={config.init_from}: nothing is downloaded; name a file or a run")
    return replace(
        config,
        init_from=init_from,
        data=replace(data, train=absolute(data.train), val=val, root=root, cache=cache),
    )


def absolute(spec: str) -> str:
    """The absolute path of a file or folder; the name of a data set stays."""
    if spec == EMBEDDED or spec.startswith(TORCHVISION):
        return spec
    return os.path.abspath(os.path.expanduser(spec))


def announce(
    config: Config,
    accelerator: Accelerator,
    schedules: Schedules,
    images: ImageSource,
    queries: ImageSource | None,
) -> None:
    """The first lines of a run: what runs where, on what, how fast it will learn."""
    optim, train = config.optim, config.train
    rule = {"linear": "global batch / 256", "sqrt": "square root of global batch / 256", "none": "not scaled"}
    if queries is None:
        found, judged = len(images), "no labels, so no k-NN"
    elif config.data.val is None and config.data.train == queries.name:
        found, judged = (
            len(images) + len(queries),
            f"{len(images)} to train on, {len(queries)} held out for k-NN",
        )
    else:
        found, judged = len(images), f"all to train on, {len(queries)} in {printable(queries.name)} for k-NN"
    logger.info(
        f"{accelerator.num_processes} process{'es' if accelerator.num_processes > 1 else ''} on "
        f"{accelerator.device.type}, {processes.resolved_precision(train.precision)}; "
        f"{found} images found in {printable(images.name)}: {judged}"
    )
    for source in (images, queries):
        if source is not None and source.passed_over and (source is images or config.data.val is not None):
            logger.info(f"passed over in {printable(source.name)}: {source.passed_over}")
    batch = changes.composition(changes.facts(schedules.course, config, accelerator.num_processes))
    logger.info(
        f"global batch {batch}; steps: {schedules.course.steps_per_epoch} per epoch, "
        f"{schedules.num_steps} in all (train.epochs={train.epochs})"
    )
    logger.info(
        f"learning rate: base {optim.lr:.3e}, peak {schedules.peak_lr:.3e} (scaling {optim.lr_scaling}: "
        f"{rule[optim.lr_scaling]}), end {optim.lr_end:.3e}; run directory {config.out}"
    )
    hint = processes.idle_cores(accelerator)
    if hint:
        logger.info(hint)
    if schedules.peak_lr < optim.lr_end:
        logger.warning(
            f"the learning rate ends above its peak {schedules.peak_lr:.3e}: lower "
            f"optim.lr_end={optim.lr_end}, raise optim.lr, or set optim.lr_scaling=none"
        )
