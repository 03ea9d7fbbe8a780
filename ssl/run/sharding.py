"""Sharded training (FSDP2): each process keeps its part of every weight, gradient and moment.

Student and teacher are cut alike, along the first dimension of each parameter, so that the moving average
needs the parts alone. A block is gathered when it is computed and let go after. On CUDA accelerate cuts the
student; it knows no FSDP elsewhere and takes one network only, so the teacher, and on CPUs the student too,
are cut here into the same units. Buffers, the center and what a checkpoint holds are whole as ever.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.optim import Optimizer

from nestling.backbones import Backbone
from nestling.backbones.adapters.blocks import blocks_of
from nestling.ssl.config import Config
from nestling.ssl.distillation import Network, SelfDistillation
from nestling.ssl.distributed import computes_on_cpu, is_sharded, local
from nestling.ssl.errors import UserError
from nestling.ssl.run.disk import size
from nestling.ssl.run.loading import build_backbone

logger = logging.getLogger("nestling")

LAUNCHERS_WISH = "ACCELERATE_USE_FSDP"  # set where the config of `accelerate launch` asks for FSDP
SUMS_ONLY = "set_force_sum_reduction_for_comms"


def is_asked(config: Config) -> bool:
    """Whether this run shards: so configured, and with several processes.

    Raises:
        UserError: the launcher asks for an FSDP of its own, or what is asked for can't be had here.
    """
    asked = f"train.sharding={config.train.sharding}"
    if os.environ.get(LAUNCHERS_WISH, "").lower() in ("1", "true", "yes"):
        raise UserError(
            f"the launcher's config asks for FSDP ({LAUNCHERS_WISH}), which {asked} decides here: start with "
            "launch/configs/multi_gpu.yaml or torchrun, and set train.sharding=full to shard"
        )
    if config.train.sharding == "none" or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return False
    if config.train.precision == "fp16":
        raise UserError(f"{asked} doesn't go with train.precision=fp16; set bf16 or fp32")
    from torch.distributed.fsdp import FSDPModule

    if computes_on_cpu() and not hasattr(FSDPModule, SUMS_ONLY):
        raise UserError(
            f"{asked} on CPUs needs a newer torch than {torch.__version__}, which may sum gradients that "
            "should be averaged: upgrade torch, or set train.sharding=none"
        )
    return True


def plugin(config: Config) -> FullyShardedDataParallelPlugin | None:
    """How accelerate is to shard, where it does.

    Raises:
        UserError: as `is_asked`, or accelerate is too old.
    """
    if not is_asked(config) or computes_on_cpu():
        return None
    if "fsdp_version" not in {field.name for field in fields(FullyShardedDataParallelPlugin)}:
        raise UserError("train.sharding=full needs accelerate 1.6 or newer: pip install -U accelerate")
    return fsdp2()


def fsdp2() -> FullyShardedDataParallelPlugin:
    """accelerate's settings that say what `shard` does; none is left to the environment.

    The policy of precision is torch's default: weights are gathered as they are, fp32, and autocast casts
    them, as without sharding. accelerate's own would gather bf16, norms and layer scales included.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        mixed_precision_policy=MixedPrecisionPolicy(),
        reshard_after_forward=True,
        cpu_offload=False,
        activation_checkpointing=False,
        cpu_ram_efficient_loading=False,
    )


def prepared(
    method: SelfDistillation, optimizer: Optimizer, accelerator: Accelerator, config: Config
) -> tuple[nn.Module, AcceleratedOptimizer]:
    """The student to call and its optimizer, for all processes: sharded with the teacher, else in DDP.

    The optimizer must be without state yet.

    Raises:
        UserError: as `is_asked`, or a parameter can't be cut.
    """
    if not is_asked(config):
        if config.train.sharding != "none":
            logger.warning(f"train.sharding={config.train.sharding} does nothing with one process")
        student, wrapped = accelerator.prepare(method.student, optimizer)
        return student, wrapped
    refuse_scalars(method.student)
    units, before = unit_classes(method.student), parameter_bytes(method.student)
    shard(method.teacher, units, accelerator.device)
    if getattr(accelerator, "is_fsdp2", False):
        accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = [unit.__name__ for unit in units]
        student, wrapped = accelerator.prepare(method.student, optimizer)
        way = "accelerate's FSDP2"
    else:
        shard_with_optimizer(method.student, optimizer, units, accelerator.device)
        student, wrapped = method.student, accelerator.prepare(optimizer)
        way = f"torch's fully_shard, as accelerate has no FSDP on {accelerator.device.type}"
    for network in (method.student, method.teacher):
        network.register_forward_hook(_let_go)
    logger.info(
        f"train.sharding=full by {way}: of the student's weights, {size(before)}, this process keeps "
        f"{size(parameter_bytes(method.student))}, and as much of the teacher's"
    )
    return student, wrapped


def refuse_scalars(network: Network) -> None:
    """Refuse parameters without a dimension to cut along."""
    for name, parameter in network.named_parameters():
        if not parameter.ndim:
            raise UserError(
                f"train.sharding=full can't cut {name} of backbone.name={network.backbone.name}, a number "
                "without dimensions; set train.sharding=none"
            )


def unit_classes(network: Network) -> tuple[type[nn.Module], ...]:
    """What is gathered at once: each block of the backbone, and the head; all the rest is one unit more."""
    classes = [type(module) for module in (*blocks_of(network.backbone), network.head)]
    return tuple(dict.fromkeys(classes))


def shard(network: nn.Module, units: tuple[type[nn.Module], ...], device: torch.device) -> None:
    """Cut all parameters of a network over all processes, in place; inner units before outer ones."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    inside = [module for module in network.modules() if module is not network and isinstance(module, units)]
    for module in (*reversed(inside), network):
        fully_shard(module, mesh=mesh)
        if device.type == "cpu":  # older gloo takes an average for a sum
            getattr(module, SUMS_ONLY)(True)


def shard_with_optimizer(
    network: nn.Module, optimizer: Optimizer, units: tuple[type[nn.Module], ...], device: torch.device
) -> None:
    """The same, and the optimizer then holds the parts."""
    whole_ones = list(network.parameters())
    shard(network, units, device)
    parts = dict(zip(whole_ones, network.parameters(), strict=True))
    for group in optimizer.param_groups:
        group["params"] = [parts[parameter] for parameter in group["params"]]


def _let_go(network: Any, inputs: object, outputs: object) -> None:
    """torch keeps the outermost unit gathered for the backward pass; where none follows, let go of it too.

    Else the teacher's parameters would be whole when the moving average reads them.
    """
    if not torch.is_grad_enabled():
        network.reshard()


def parameter_bytes(module: nn.Module) -> int:
    """What this process keeps of its parameters."""
    return sum(local(parameter).nbytes for parameter in module.parameters())


def is_applied(module: nn.Module) -> bool:
    """Whether its parameters lie in parts on several processes."""
    return any(map(is_sharded, module.parameters()))


def gathered(method: SelfDistillation, optimizer: Optimizer, is_kept: bool) -> dict[str, Any]:
    """The states that a checkpoint holds, the same as without sharding, where these are copies.

    All processes call this together. A process that doesn't keep them gets no tensors.
    """
    states = {
        "student": method.student.state_dict(),
        "teacher": method.teacher.state_dict(),
        "terms": method.terms.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    return _on_cpu(states, is_kept) if is_applied(method.student) else states


def _on_cpu(tree: Any, is_kept: bool) -> Any:
    """Copies of all tensors, gathered one after the other, so that a device holds a single whole one."""
    if isinstance(tree, Mapping):
        return {key: _on_cpu(value, is_kept) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_on_cpu(value, is_kept) for value in tree)
    if not isinstance(tree, Tensor):
        return tree
    whole = _whole(tree)
    return whole.to("cpu", copy=whole is tree) if is_kept else None


def _whole(tensor: Any) -> Tensor:
    """All parts of a sharded tensor put together; any other tensor itself."""
    return tensor.detach().full_tensor() if is_sharded(tensor) else tensor


def whole_backbone(backbone: Backbone, config: Config) -> Backbone:
    """The backbone itself, or of a sharded one a copy for evaluation; all processes call this together.

    Evaluation needs one: its processes have unequal numbers of batches, so none can wait for the others
    in a forward pass.
    """
    if not is_applied(backbone):
        return backbone
    with torch.random.fork_rng(devices=[]):  # it is built on the CPU
        copy = build_backbone(config)
    copy.to(next(backbone.parameters()).device).requires_grad_(False)
    state = backbone.state_dict()
    for name, tensor in copy.state_dict().items():
        tensor.copy_(_whole(state[name]))
    return copy


def load(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load whole tensors into a module, sharded or not."""
    own = module.state_dict()
    module.load_state_dict({name: _cut_like(own.get(name), tensor) for name, tensor in state.items()})


def load_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load the whole state of an optimizer into one whose parameters are sharded or not."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        index: {
            key: _cut_like(parameters[index], value) if key != "step" else value
            for key, value in moments.items()
        }
        for index, moments in saved["state"].items()
    }
    optimizer.load_state_dict({**saved, "state": state})


def _cut_like(target: Any, value: Any) -> Any:
    """A whole tensor cut as `target` is, which all processes do together; anything else as it is."""
    if not is_sharded(target) or not isinstance(value, Tensor):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(target.device), target.device_mesh, target.placements)
