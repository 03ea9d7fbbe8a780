"""Student and teacher: self-distillation with no labels (Caron et al., 2021, algorithm 1).

Shapes used below: B images, V views, D backbone width, K prototypes.
"""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nestling import backbones
from nestling.backbones import Backbone
from nestling.ssl import terms
from nestling.ssl.config import Config
from nestling.ssl.data.channels import backbone_options
from nestling.ssl.distributed import average, is_sharded, local
from nestling.ssl.heads import DeferredLogits, ProjectionHead
from nestling.ssl.terms import Outputs, Term

BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)


class Network(nn.Module):
    """A backbone and its projection head.

    It takes all crop sizes in one call, so that DDP sees one forward per backward, and projects
    the class tokens of all views at once. The last layer is left to the loss, which is faster with
    both at once; not where its weights lie in parts, as they are whole only in here.
    """

    def __init__(self, backbone: Backbone, head: ProjectionHead) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, views: list[Tensor], batch_size: int) -> Outputs:
        """`views`: per crop size (V * B, C, H, W), view-major."""
        vectors = self.backbone.view_vectors(views)
        sizes, together = [len(images) for images in views], torch.cat(vectors)
        last_layer = self.head.last_layer
        if is_sharded(last_layer.weight_v):
            return Outputs(vectors, self.head(together).split(sizes), batch_size)
        bottleneck = self.head.bottleneck(together)
        return Outputs(vectors, DeferredLogits(bottleneck, last_layer, sizes), batch_size)


def build_network(config: Config) -> Network:
    """The student as the config describes it."""
    backbone = backbones.create(
        config.backbone.name, drop_path=config.backbone.drop_path, **backbone_options(config)
    )
    backbone.activation_checkpointing = config.train.activation_checkpointing
    head = config.head
    return Network(
        backbone,
        ProjectionHead(
            backbone.embed_dim,
            head.num_prototypes,
            head.hidden_dim,
            head.bottleneck_dim,
            head.num_layers,
            head.batch_norm,
            head.norm_last_layer,
        ),
    )


class SelfDistillation(nn.Module):
    """The student, its teacher and the terms of the loss.

    The teacher never drops paths or units. Its batch norms use the statistics of their own
    batch, as in the published recipe, and so keep true running statistics of the *teacher's*
    activations; `update_teacher` averages those over processes. An exported teacher in
    `eval()` is therefore ready to use, which an average over parameters alone is not.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.student = build_network(config)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.terms = terms.build(config)
        self.weights = dict(config.terms)
        self.train()

    def train(self, mode: bool = True) -> "SelfDistillation":
        super().train(mode)
        self.teacher.eval()
        for module in batch_norms(self.teacher):
            module.train(mode)
        return self

    @torch.no_grad()
    def targets(self, global_views: Tensor, batch_size: int) -> Outputs:
        """The teacher's outputs on the global views (2B, C, H, W)."""
        return self.teacher([global_views], batch_size)

    def loss(
        self, student: Outputs, teacher: Outputs, temperature: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted sum of the terms, and what they report."""
        total = torch.zeros((), device=student.vectors[0].device)
        metrics: dict[str, Tensor] = {}
        for name, term in self.terms.items():
            loss, reported = term(student, teacher, temperature)
            total = total + self.weights[name] * loss
            metrics |= {f"{name}/{key}": value for key, value in reported.items()}
            metrics[f"{name}/loss"] = loss.detach()
        metrics["feature_std"] = feature_std(teacher.vectors[0])
        return total, metrics

    @torch.no_grad()
    def update_teacher(self, momentum: float) -> None:
        """teacher <- momentum * teacher + (1 - momentum) * student, then each term's own state.

        Once per step.
        """
        follow(self.teacher, self.student, momentum)
        average(running_statistics(self.teacher))
        average(running_statistics(self.student))
        for term in self.terms.children():
            assert isinstance(term, Term)
            term.update()


@torch.no_grad()
def follow(teacher: nn.Module, student: nn.Module, momentum: float) -> None:
    """Move the teacher's parameters; those that are equal stay equal bit for bit: t + w (s - t) = t."""
    pairs = zip(teacher.parameters(), student.parameters(), strict=True)
    averaged, current = zip(*((local(mine), local(other)) for mine, other in pairs), strict=True)
    torch._foreach_lerp_(averaged, current, 1 - momentum)


def batch_norms(module: nn.Module) -> Iterator[nn.Module]:
    """Every batch norm inside `module`."""
    return (child for child in module.modules() if isinstance(child, BATCH_NORMS))


def running_statistics(module: nn.Module) -> list[Tensor]:
    """Running means and variances of all its batch norms that are not synchronised already."""
    return [
        buffer
        for norm in batch_norms(module)
        if not isinstance(norm, nn.SyncBatchNorm)
        for buffer in norm.buffers(recurse=False)
        if buffer.is_floating_point()
    ]


@torch.no_grad()
def feature_std(features: Tensor) -> Tensor:
    """Spread of L2-normalised features (B, D): 1 where they fill the sphere, 0 when collapsed.

    sqrt(D) times the mean over dimensions of their standard deviation (SimSiam, section 4.1).
    """
    normalised = nn.functional.normalize(features.float(), dim=-1)
    return normalised.std(dim=0).mean() * features.shape[-1] ** 0.5
