"""Activation checkpointing inside networks that don't know of it: at the blocks that they repeat."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from nestling.backbones.checkpointing import statistics_kept


def blocks_of(network: nn.Module) -> list[nn.Module]:
    """The members of a network's lists that hold two weights or more: residual blocks, cells, layers.

    A member that itself holds a list of such members (a stage) is looked into.
    """
    found: list[nn.Module] = []
    for child in network.children():
        if _is_list(network) and _is_block(child):
            found.append(child)
        else:
            found += blocks_of(child)
    return found


def _is_block(module: nn.Module) -> bool:
    inner = [child for child in module.children() if _is_list(child)]
    return _is_large(module) and not any(map(_holds_blocks, inner))


def _holds_blocks(list_: nn.Module) -> bool:
    members = list(list_.children())
    return bool(members) and all(_holds_blocks(x) if _is_list(x) else _is_large(x) for x in members)


def _is_large(module: nn.Module) -> bool:
    return not _is_list(module) and _num_weights(module) >= 2


def _is_list(module: nn.Module) -> bool:
    """torch's own lists, and stages that name their blocks one by one."""
    if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        return True
    members = list(module.children())
    alike = len(members) > 1 and len({type(member) for member in members}) == 1
    return alike and all(_num_weights(member) >= 2 for member in members)


def _num_weights(module: nn.Module) -> int:
    return sum(parameter.ndim > 1 for parameter in module.parameters())


@contextmanager
def checkpointing(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """While it lasts, the blocks keep no activations: they compute them again in the backward pass."""
    for block in blocks:
        block.forward = _checkpointed(block)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward  # the class's own shows again


def _checkpointed(block: nn.Module) -> Callable[..., Any]:
    forward = block.forward

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), statistics_kept(block)

    def run(*inputs: Any, **keywords: Any) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts, **keywords)

    return run
