"""What one tiny step tells before the first real one."""

import torch

from nestling.ssl.config import Config
from nestling.ssl.data.channels import channels
from nestling.ssl.distillation import SelfDistillation
from nestling.ssl.errors import UserError
from nestling.ssl.keys import show
from nestling.ssl.views.plan import NUM_GLOBAL

ENOUGH_IMAGES = 2  # what holds for two images holds for more; one is a case of its own
NAMES_TOLD = 3
ONE_VALUE = "Expected more than 1 value per channel"  # torch's batch norms


def try_a_step(method: SelfDistillation, config: Config, dtype: torch.dtype | None = None) -> None:
    """Compute loss and gradients of at most two random images at the smallest sizes; leave no trace.

    `dtype` is the autocast's. All processes call this together, before anything is wrapped.

    Raises:
        UserError: a parameter gets no gradient, or a batch norm has a single value to learn from.
    """
    device = next(method.parameters()).device
    before = [buffer.clone() for buffer in method.buffers()]
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            _step(method, config, device, dtype)
        _refuse_without_gradient(method, config)
    except ValueError as error:
        if ONE_VALUE not in str(error):
            raise
        views = config.views
        raise UserError(
            f"train.batch_size={config.train.batch_size} with views.num_local={views.num_local} and "
            f"views.local_size={show(views.local_size)} leaves a batch norm of backbone.name="
            f"{config.backbone.name} a single value, which has no variance: raise one of the three"
        ) from error
    finally:
        with torch.no_grad():
            for buffer, kept in zip(method.buffers(), before, strict=True):
                buffer.copy_(kept)
        method.zero_grad(set_to_none=True)


def _step(method: SelfDistillation, config: Config, device: torch.device, dtype: torch.dtype | None) -> None:
    views, size = config.views, min(config.train.batch_size, ENOUGH_IMAGES)
    groups = [(NUM_GLOBAL, min(views.global_size)), (views.num_local, min(views.local_size))]
    images = [
        torch.rand(count * size, channels(config.data), side, side, device=device)
        for count, side in groups
        if count
    ]
    with torch.autocast(device.type, dtype, enabled=dtype is not None):
        targets = method.targets(images[0], size)
        loss, _ = method.loss(method.student(images, size), targets, config.teacher.temperature)
    loss.backward()


def _refuse_without_gradient(method: SelfDistillation, config: Config) -> None:
    left = [name for name, p in method.student.named_parameters() if p.requires_grad and p.grad is None]
    if left:
        more = f" and {len(left) - NAMES_TOLD} more" if len(left) > NAMES_TOLD else ""
        told = ", ".join(left[:NAMES_TOLD]) + more
        raise UserError(
            f"backbone.name={config.backbone.name}: no gradient reaches {told}: "
            "build it without what never learns, or set requires_grad of that to False"
        )
