"""Parameter groups, optimizers and the two kinds of gradient clipping."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from nestling.ssl.config import Optim
from nestling.ssl.distillation import Network
from nestling.ssl.distributed import is_sharded, local, summed
from nestling.ssl.schedules import StepValues

PARTS, LARGE = 16, 2**17  # of a gradient, and from how many numbers on


def is_spared(name: str, parameter: Tensor, listed: set[str]) -> bool:
    """Whether weight decay leaves a parameter alone: biases and norms by shape, the rest by name."""
    return parameter.ndim <= 1 or name.endswith(".bias") or name in listed


def parameter_groups(network: Network) -> list[dict[str, object]]:
    """Two groups: decayed and spared.

    The backbone lists what its shape does not tell (tokens, position embeddings, layer scales,
    temperatures): XCA's temperature has three dimensions, so a rule by shape alone decays it.
    """
    listed = {f"backbone.{name}" for name in network.backbone.no_weight_decay()}
    known = {name for name, _ in network.named_parameters()}
    assert listed <= known, f"no_weight_decay() names unknown parameters: {sorted(listed - known)}"
    decayed: list[Tensor] = []
    spared: list[Tensor] = []
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            (spared if is_spared(name, parameter, listed) else decayed).append(parameter)
    return [{"params": decayed, "decays": True}, {"params": spared, "decays": False}]


def build(config: Optim, groups: list[dict[str, object]], fused: bool = True) -> torch.optim.Optimizer:
    """The optimizer by name; learning rate and weight decay are set at every step by `apply`."""
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=0.0, betas=(config.betas[0], config.betas[1]), fused=fused)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=config.momentum)
    from lightly.utils.lars import LARS  # late: lightly takes seconds to import

    return LARS(groups, lr=0.0, momentum=config.momentum)


def apply(optimizer: torch.optim.Optimizer, values: StepValues) -> None:
    """Write a step's learning rate and weight decay into the optimizer."""
    for group in optimizer.param_groups:
        group["lr"] = values.lr
        group["weight_decay"] = values.weight_decay if group["decays"] else 0.0


def freeze(module: nn.Module) -> None:
    """Take the gradients of a part of the network away before a step.

    None, not zero: an optimizer skips a parameter without gradient, weight decay and momentum
    included, so the part stays bit-identical.
    """
    for parameter in module.parameters():
        parameter.grad = None


def gradient_norms(parameters: Iterable[Tensor]) -> tuple[list[Tensor], Tensor]:
    """All P gradients, or this process's parts of them, and the norm of each as a whole, (P,)."""
    found = [parameter.grad for parameter in parameters if parameter.grad is not None]
    gradients = [local(gradient) for gradient in found]
    norms = torch.stack(torch._foreach_norm([of_same_norm(gradient) for gradient in gradients]))
    if any(map(is_sharded, found)):  # then all are
        norms = summed(norms.square()).sqrt()
    return gradients, norms


def of_same_norm(gradient: Tensor) -> Tensor:
    """The gradient; of a large one on the CPU the norms of its parts, (PARTS,).

    torch gives a single norm to one thread, several to all of them, and is off by 6e-4 for 17 M numbers, of
    parts by 1e-5. These are the same for all numbers of threads, and so is what they add up to.
    """
    large = gradient.numel() >= LARGE and gradient.numel() % PARTS == 0
    if gradient.device.type != "cpu" or not large or not gradient.is_contiguous():
        return gradient
    return torch.linalg.vector_norm(gradient.view(PARTS, -1), dim=1)


@torch.no_grad()
def clip(parameters: Iterable[Tensor], mode: str, max_norm: float) -> Tensor:
    """Clip gradients in place; returns their global norm before.

    per_parameter: each gradient is scaled on its own to a norm of at most `max_norm`, as DINO does.
    global_norm: all are scaled by one factor, as `clip_grad_norm_` does.
    none: nothing is scaled.
    A norm of NaN scales no other gradient, so that the ones at fault can still be told.
    """
    gradients, norms = gradient_norms(parameters)
    total = norms.norm()
    if mode == "per_parameter":
        scale(gradients, (max_norm / (norms + 1e-6)).clamp(max=1.0))
    elif mode == "global_norm":
        scale(gradients, (max_norm / (total + 1e-6)).clamp(max=1.0).nan_to_num(nan=1.0))
    return total


def scale(gradients: list[Tensor], factors: Tensor) -> None:
    """Multiply each of P gradients in place by its factor, (P,), or all by one, ().

    On the CPU a factor of 1 is left out, which spares a pass over memory and no bit; a GPU would have
    to be waited for to know it.
    """
    if factors.device.type == "cpu":
        for gradient, factor in zip(gradients, factors.expand(len(gradients)).tolist(), strict=True):
            if factor != 1:
                gradient.mul_(factor)
    else:
        torch._foreach_mul_(gradients, list(factors.unbind()) if factors.ndim else factors)
