"""How a run meets accelerate: processes, precision, what differs between them."""

import logging
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    KwargsHandler,
    LoggerType,
)
from torch import nn

from nestling.ssl import allocator
from nestling.ssl.config import Config
from nestling.ssl.distributed import (
    computes_on_cpu,
    cpu_multiplies_bf16,
    is_distributed,
    processes_here,
    usable_cpus,
)
from nestling.ssl.errors import UserError
from nestling.ssl.run import sharding

logger = logging.getLogger("nestling")

PATIENCE = timedelta(hours=2)  # of a collective; what may take longer is waited for `patiently`

# What torch would say once per process of several, and why it needs no answer.
HARMLESS = {
    # Its successor is unknown to accelerate and to older torch.
    "`broadcast_buffers` is deprecated": FutureWarning,
    # Depthwise kernels, whose only input channel may have any stride: DDP copies a few kilobytes.
    "Grad strides do not match bucket view strides": UserWarning,
    # Logits of one crop size are a view of all logits, and nobody writes into them.
    "FSDP2-wrapped module .* returned a view tensor": UserWarning,
}

# What gloo and NCCL say of a process that they can no longer reach.
GONE = re.compile(
    r"closed by (remote )?peer|connection (reset|refused)|broken pipe|remote process exited|gloo.*timed out"
    r"|no sign of life",
    re.IGNORECASE | re.DOTALL,
)


def start(config: Config) -> Accelerator:
    """Join the processes that the launcher started, each on its device.

    Running statistics are averaged by `SelfDistillation`, so DDP need not broadcast those of
    process 0 at every forward.

    Raises:
        UserError: another number of processes than expected, a precision or tracker that can't be had here.
    """
    for message, category in HARMLESS.items():
        warnings.filterwarnings("ignore", message, category)
    check_world_size(config.expect_world_size)
    check_trackers(config.log.trackers)
    precision = resolved_precision(config.train.precision)
    # Sharded gradients are summed after every micro-batch: kept until the last one, they would be whole.
    accumulation = GradientAccumulationPlugin(
        num_steps=config.train.accumulation, sync_each_batch=config.train.sharding != "none"
    )
    accelerator = join(
        mixed_precision="no" if precision == "fp32" else precision,
        gradient_accumulation_plugin=accumulation,
        fsdp_plugin=sharding.plugin(config),
        log_with=config.log.trackers or None,
        project_dir=config.out,
        step_scheduler_with_optimizer=False,
        handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
    )
    os.environ.pop(sharding.LAUNCHERS_WISH, None)  # accelerate makes it its own; a next run here is free
    return accelerator


def join(handlers: Sequence[KwargsHandler] = (), **settings: Any) -> Accelerator:
    """accelerate's view of the processes that were started, checked against the launcher's.

    One that computes on a CPU keeps memory that it freed.

    accelerate takes several processes on CPUs for strangers unless it is told `cpu=True`: each
    would train alone.

    Raises:
        UserError: accelerate sees another number of processes than the launcher started.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    patient = InitProcessGroupKwargs(timeout=PATIENCE)
    accelerator = Accelerator(
        cpu=started > 1 and computes_on_cpu(), kwargs_handlers=[patient, *handlers], **settings
    )
    if accelerator.num_processes != started:
        raise UserError(
            f"the launcher started WORLD_SIZE={started} processes, but {accelerator.num_processes} joined; "
            "start with `torchrun --nproc_per_node N` or `accelerate launch --num_processes N`"
        )
    if accelerator.device.type == "cpu":
        allocator.keep_freed()
    return accelerator


def check_world_size(expected: int | None) -> None:
    """Refuse another number of processes than expected: a launcher that starts fewer says nothing."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if expected is not None and started != expected:
        raise UserError(
            f"expect_world_size={expected}, but the launcher started {started}: start with `torchrun "
            "--nproc_per_node N` or `accelerate launch --num_processes N`, N per machine, or change the key"
        )


@contextmanager
def gone_explained() -> Iterator[None]:
    """Say in one sentence that another process is gone: its own words are the ones that matter."""
    try:
        yield
    except RuntimeError as error:
        if not is_distributed() or not GONE.search(str(error)):
            raise
        raise UserError(
            "another process of this run has ended, so this one can't go on; if it said why, that stands "
            "above; resume=auto goes on from the last checkpoint"
        ) from error


def check_trackers(names: list[str]) -> None:
    """Refuse trackers that accelerate does not know or that are not installed: it would go on without."""
    known = [str(kind.value) for kind in LoggerType if kind.value != "all"]
    installed = [str(getattr(kind, "value", kind)) for kind in get_available_trackers()]
    for name in names:
        if name not in known:
            raise UserError(f"log.trackers={names}: unknown tracker {name}; there are {', '.join(known)}")
        if name not in installed:
            raise UserError(f"log.trackers={names}: {name} is not installed; install it or leave it out")


def resolved_precision(asked: str) -> str:
    """What `auto` means on this machine.

    Raises:
        UserError: fp16 without a GPU, whose gradients nothing scales.
    """
    if asked == "fp16" and (computes_on_cpu() or not torch.cuda.is_available()):
        raise UserError("train.precision=fp16 needs a CUDA device and none is used; bf16 and fp32 work here")
    if asked != "auto":
        return asked
    return "bf16" if multiplies_bf16() else "fp32"


def multiplies_bf16() -> bool:
    """Whether the device multiplies bf16 natively; elsewhere it is slower than fp32."""
    if not computes_on_cpu():
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return cpu_multiplies_bf16()


def synchronise_batch_norms(module: nn.Module, accelerator: Accelerator) -> None:
    """Make them SyncBatchNorm on CUDA with several processes; elsewhere torch has none: said once."""
    norms = sum(isinstance(child, nn.modules.batchnorm._BatchNorm) for child in module.modules())
    if accelerator.num_processes == 1 or not norms:
        return
    if accelerator.device.type == "cuda":
        nn.SyncBatchNorm.convert_sync_batchnorm(module)
        logger.info(f"{norms} batch norms (student and teacher) are synchronised over all processes")
        return
    logger.info(
        f"{norms} batch norms (student and teacher) use the statistics of their own process's images: "
        f"SyncBatchNorm needs CUDA, this is {accelerator.device.type}"
    )


def autocast_dtype(accelerator: Accelerator) -> torch.dtype | None:
    """The dtype of this run's autocast, None for fp32."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)


def idle_cores(accelerator: Accelerator) -> str:
    """A sentence where training on CPUs leaves cores idle, as accelerate's launcher does by default."""
    share, threads = max(usable_cpus() // processes_here(), 1), torch.get_num_threads()
    if accelerator.device.type != "cpu" or threads >= share:
        return ""
    return (
        f"{threads} of {share} CPU cores per process are used: start with OMP_NUM_THREADS={share} to use all"
    )
