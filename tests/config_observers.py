"""What can be seen of a config: functions from a config to plain values that repeat to the bit.

Each runs the real code on a small scale; for the test that every key of the config has an effect.
"""

import hashlib
import logging
import multiprocessing
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn

from nestling import backbones
from nestling.ssl.compiling import compile_blocks
from nestling.ssl.config import Config
from nestling.ssl.data.channels import backbone_options
from nestling.ssl.data.loader import TrainLoader
from nestling.ssl.data.order import steps_per_epoch
from nestling.ssl.data.sources.opening import open_pair, open_source
from nestling.ssl.distillation import SelfDistillation
from nestling.ssl.errors import Stopped, UserError
from nestling.ssl.evaluation.online import OnlineKnn
from nestling.ssl.pretraining import pretrain
from nestling.ssl.run import checkpoints, log, writing


def digest(tensor: Tensor) -> str:
    """Equal tensors have equal ones."""
    plain = tensor.detach().cpu().contiguous()
    return hashlib.sha256(f"{plain.dtype}{plain.shape}".encode() + plain.numpy().tobytes()).hexdigest()[:16]


@contextmanager
def left_as_found() -> Iterator[None]:
    """accelerate forgets the run, and nestling's logger speaks as before."""
    logger = logging.getLogger("nestling")
    state = logger.handlers, logger.level, logger.propagate
    try:
        yield
    finally:
        logger.handlers, level, logger.propagate = state
        logger.setLevel(level)  # not the attribute: it caches what the level let through
        AcceleratorState._reset_state(True)
        PartialState._reset_state()
        GradientState._reset_state()


def run(config: Config) -> str:
    """Pretrain in this process; returns what the console said."""
    with left_as_found(), redirect_stdout(StringIO()) as console:
        pretrain(config)
    return console.getvalue()


def learned(config: Config) -> dict[str, str]:
    """The last checkpoint's student and teacher."""
    run(config)
    newest = checkpoints.newest(Path(config.out))
    assert newest is not None
    saved = checkpoints.load(newest)
    networks = {"student": saved.student, "teacher": saved.teacher}
    return {
        f"{network}.{name}": digest(tensor)
        for network, state in networks.items()
        for name, tensor in state.items()
    }


def files(config: Config) -> list[str]:
    """All that a run leaves on disk."""
    run(config)
    out = Path(config.out)
    return sorted(str(path.relative_to(out.parent)) for path in out.rglob("*"))


def full_disk(config: Config) -> bool:
    """Whether a run ends whose first checkpoint finds no room; one that waits gets it when it says so."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)

    def make_room(record: logging.LogRecord) -> bool:
        if "waits for room" in record.getMessage():
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        return True

    logger, patience = logging.getLogger("nestling"), writing.SECONDS_BETWEEN_TRIES
    logger.addFilter(make_room)  # no handler: a run replaces these
    writing.SECONDS_BETWEEN_TRIES = 0.1
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16_384, limit[1]))
        return "file too large" in beginning(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        logger.removeFilter(make_room)
        writing.SECONDS_BETWEEN_TRIES = patience


def logged(config: Config) -> list[tuple[float, list[str]]]:
    """The steps of log.jsonl and what stands there."""
    run(config)
    return [(record["step"], sorted(record)) for record in log.read(Path(config.out) / "log.jsonl")]


def console(config: Config) -> list[str]:
    """The steps that the console tells of."""
    return [line.split()[1] for line in run(config).splitlines() if line.startswith("step ")]


def warned(config: Config) -> list[str]:
    """What the console warns of."""
    return [line for line in run(config).splitlines() if line.startswith("warning")]


def second_start(config: Config) -> tuple[str, bool]:
    """A start where a run is finished: what comes of it, and whether that run's folder is still there."""
    run(replace(config, resume="never", overwrite=False))
    mark = Path(config.out) / "mark"
    mark.touch()
    try:
        run(config)
    except UserError:
        return "refused", mark.exists()
    return "went on", mark.exists()


def scanned(config: Config) -> list[str]:
    """What opening the images leaves beside the run."""
    open_pair(config)
    beside = Path(config.out).parent
    return sorted(path.suffix for path in beside.rglob("*"))


def split(config: Config) -> list[list[str]]:
    """The files to train on, and those that k-NN queries."""
    return [[source.path(i) for i in range(len(source))] for source in open_pair(config) if source]


def batches(config: Config) -> TrainLoader:
    images = open_source(config.data, "train")
    return TrainLoader(images, config, config.train.epochs * steps_per_epoch(len(images), config, 1), 0, 1)


def order(config: Config) -> list[tuple[int, list[int]]]:
    """Which images make which micro-batch of which step."""
    return [(batch.step, batch.indices.tolist()) for batch in batches(config)]


def views(config: Config) -> list[list[str]]:
    """The rendered views of every micro-batch."""
    return [[digest(view) for view in batch.views] for batch in batches(config)]


def children() -> set[multiprocessing.process.BaseProcess]:
    return set(multiprocessing.active_children())


def loader_processes(config: Config) -> list[str]:
    """The kinds of processes that load while training reads."""
    before = children()
    with batches(config) as loader:
        next(iter(loader))
        return sorted(type(child).__name__ for child in children() - before)


def structure(config: Config) -> list[tuple[str, tuple[int, ...], bool]]:
    """Every parameter of student and teacher, its shape, and whether it learns."""
    parameters = SelfDistillation(config).named_parameters()
    return [(name, tuple(parameter.shape), parameter.requires_grad) for name, parameter in parameters]


def beginning(config: Config) -> str:
    """How the first step of a run comes about: what it was refused for, if it was."""
    try:
        run(config)
    except (UserError, Stopped) as error:
        return str(error)
    return "trained"


def checkpointed(config: Config) -> int:
    """How often the first block runs in a forward and its backward pass."""
    network = SelfDistillation(config).student
    runs: list[object] = []
    block = next(module for name, module in network.named_modules() if name.endswith("blocks.0"))
    block.register_forward_pre_hook(lambda *_: runs.append(None))
    network([torch.zeros(2, 3, 16, 16)], 1).logits[0].sum().backward()
    return len(runs)


def compiled(config: Config) -> list[str]:
    """What of student and teacher is to be compiled when it is first called."""
    method = SelfDistillation(config)
    compile_blocks(method, config)
    return [name for name, module in method.named_modules() if module._compiled_call_impl is not None]


def judge(config: Config, hook: Callable[[nn.Module, tuple[Tensor]], None]) -> dict[str, float]:
    """k-NN of an untrained backbone, which shows `hook` every batch."""
    torch.manual_seed(0)
    backbone = backbones.create(config.backbone.name, **backbone_options(config))
    backbone.register_forward_pre_hook(hook)
    images, queries = open_pair(config)
    assert queries is not None
    return OnlineKnn(images, queries, config).judge(backbone, "cpu")


def accuracies(config: Config) -> dict[str, float]:
    """What k-NN says."""
    return judge(config, lambda *_: None)


def judged_images(config: Config) -> list[tuple[tuple[int, ...], str]]:
    """The batches that k-NN shows to the backbone."""
    seen: list[tuple[tuple[int, ...], str]] = []
    judge(config, lambda _, inputs: seen.append((tuple(inputs[0].shape), digest(inputs[0]))))
    return seen


def operations(config: Config) -> list[str]:
    """What torch computes for k-NN: faiss finds neighbours without it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        accuracies(config)
    return sorted({event.key for event in profile.key_averages() if event.key.startswith("aten::")})
