"""The parts of a training step as DINO's paper and its published recipe state them, written out plainly.

Peers for the benchmarks: one parameter after the other, one pair of views after the other, the last layer
by torch's own weight norm. Written from Caron et al., 2021 (algorithm 1, appendix C).

Shapes used below: B images, V views of which the first two are global, K prototypes.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

NUM_GLOBAL = 2


@torch.no_grad()
def ema_loop(teacher: Iterable[Tensor], student: Iterable[Tensor], momentum: float) -> None:
    """teacher <- momentum * teacher + (1 - momentum) * student, one parameter after the other."""
    for averaged, current in zip(teacher, student, strict=True):
        averaged.mul_(momentum).add_((1 - momentum) * current)


@torch.no_grad()
def clip_loop(parameters: Iterable[Tensor], max_norm: float) -> list[float]:
    """Scale each gradient to a norm of at most `max_norm`; returns the norms before."""
    norms = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        norm = parameter.grad.norm(2)
        norms.append(norm.item())
        factor = max_norm / (norm + 1e-6)
        if factor < 1:
            parameter.grad.mul_(factor)
    return norms


def adamw_loop(
    parameters: Iterable[Tensor] | Iterable[dict[str, object]], lr: float = 0.0
) -> torch.optim.AdamW:
    """torch's AdamW, one parameter after the other."""
    return torch.optim.AdamW(parameters, lr=lr, foreach=False, fused=False)


class PublishedHead(nn.Module):
    """MLP with GELU, L2 normalisation, then a layer of prototypes under torch's own weight norm.

    Shape:
        x: (B, D) -> (B, K)
    """

    def __init__(
        self, in_dim: int, num_prototypes: int, hidden_dim: int = 2048, bottleneck_dim: int = 256
    ) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(in_dim, hidden_dim),
            nn.GELU(),
            nn.Linear(hidden_dim, hidden_dim),
            nn.GELU(),
            nn.Linear(hidden_dim, bottleneck_dim),
        )
        self.last_layer = weight_norm(nn.Linear(bottleneck_dim, num_prototypes, bias=False))
        gain = self.last_layer.parametrizations.weight.original0
        gain.requires_grad_(False).fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.last_layer(F.normalize(self.mlp(x), dim=-1))


class PairLoss(nn.Module):
    """The multi-crop loss, one pair of views after the other; the center moves at every call.

    Shape:
        student: (V * B, K), teacher: (2 * B, K), both view-major
    """

    center: Tensor

    def __init__(self, num_prototypes: int, temperature: float = 0.1, center_momentum: float = 0.9) -> None:
        super().__init__()
        self.temperature, self.center_momentum = temperature, center_momentum
        self.register_buffer("center", torch.zeros(1, num_prototypes))

    def forward(self, student: Tensor, teacher: Tensor, teacher_temperature: float) -> Tensor:
        views = (student / self.temperature).split(len(teacher) // NUM_GLOBAL)
        targets = F.softmax((teacher - self.center) / teacher_temperature, dim=-1).detach()
        loss = pair_loss(views, targets.chunk(NUM_GLOBAL))
        self.update_center(teacher)
        return loss

    @torch.no_grad()
    def update_center(self, teacher: Tensor) -> None:
        mean = teacher.sum(dim=0, keepdim=True) / len(teacher)
        self.center = self.center * self.center_momentum + mean * (1 - self.center_momentum)


def pair_loss(views: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """Mean over pairs (t, v), t != v, of -sum_k q_t log p_v; `views` are logits over their temperature."""
    total, num_pairs = torch.zeros((), device=views[0].device), 0
    for t, target in enumerate(targets):
        for v, logits in enumerate(views):
            if v != t:
                total = total + (-target * F.log_softmax(logits, dim=-1)).sum(dim=-1).mean()
                num_pairs += 1
    return total / num_pairs
