"""`train.compile=blocks`: torch.compile, one block of a backbone at a time.

Blocks of one kind share their code, so a network of any depth compiles a few graphs where the whole would
be one of thousands of operations. Blocks are compiled in place: names of weights, copies, checkpoints and
exports stay as they are, and DDP, FSDP2 and activation checkpointing work around them.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from nestling.backbones.adapters.blocks import blocks_of
from nestling.ssl.config import Config
from nestling.ssl.distillation import SelfDistillation
from nestling.ssl.distributed import failing_together
from nestling.ssl.errors import UserError
from nestling.ssl.names import printable

NEEDS = {
    "cpu": "it needs a C++ compiler (CXX names it, else g++, clang++ or cl)",
    "cuda": "it needs Triton, a C compiler and Python's headers",
}


def is_asked(config: Config) -> bool:
    return config.train.compile != "none"


def refuse_where_impossible(config: Config, device: torch.device) -> None:
    """Compile a tiny function, so that what is missing shows before any work; all processes do it together.

    Raises:
        UserError: nothing can be compiled here.
    """
    if not is_asked(config):
        return
    needs = NEEDS.get(device.type, "it needs its own compilers")
    with failing_together(), explained(config, f"the smallest function on {device.type}, where {needs}"):
        torch.compile(_tiny)(torch.ones(16, device=device))


def _tiny(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + x.exp()


def compile_blocks(method: SelfDistillation, config: Config) -> None:
    """Let every block of student and teacher be compiled when it is first called.

    One graph per size of views, or per pair where the family takes both sizes together, of fixed shapes:
    symbolic ones are slower, and Inductor fails on some of XCiT's. Random numbers are drawn as without
    compilation, so that a run may go on either way.
    """
    if not is_asked(config):
        return
    views, networks = config.views, (method.student, method.teacher)
    num_sizes = (len(views.global_size) + 1) * (len(views.local_size) + 1)  # pairs, and each apart
    blocks = [block for network in networks for block in blocks_of(network.backbone)]
    from torch._dynamo import config as dynamo  # late: it takes a second to import

    # All blocks count as one function, and above its limit torch would go on without compiling. Activation
    # checkpointing calls each block in a second way.
    enough = 2 * num_sizes * len(blocks) + dynamo.recompile_limit
    dynamo.recompile_limit = enough
    dynamo.accumulated_recompile_limit = max(enough, dynamo.accumulated_recompile_limit)
    dynamo.optimize_ddp = False  # which would cut blocks where DDP's buckets end; a block is small enough
    for block in blocks:
        block.compile(dynamic=False, options={"fallback_random": True})


def eagerly(config: Config) -> AbstractContextManager[object]:
    """While it lasts, blocks run as they are written: no size is compiled anew, and all hooks are called."""
    return torch.compiler.set_stance("force_eager") if is_asked(config) else nullcontext()


@contextmanager
def explained(config: Config, what: str = "") -> Iterator[None]:
    """Say in one sentence what could not be compiled.

    Raises:
        UserError: torch.compile failed.
    """
    if not is_asked(config):
        yield
        return
    from torch._dynamo.exc import TorchDynamoException

    try:
        yield
    except TorchDynamoException as error:
        said = str(error).strip().partition("\n")[0]
        what = what or f"a block of backbone.name={printable(config.backbone.name)}"
        raise UserError(
            f"train.compile={config.train.compile}: torch.compile fails for {what} ({said}); "
            "set train.compile=none"
        ) from error
