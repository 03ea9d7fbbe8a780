"""A whole training step of DINO on XCiT-T12/16: forward, loss, backward, clipping, AdamW, moving average.

    python benchmarks/whole_step.py [--threads 1 2] [--quick] [--json FILE] [--device cuda]

Ours is what training runs, without accelerate around it. The peer is timm's XCiT with the same weights, a
head under torch's own weight norm, the loss by pairs of views and loops over the parameters. Both see 2 views
of 224 and 8 of 96 pixels of 8 images, with 65,536 prototypes, in fp32, without drop path.

Each runs under the allocator that its training has: ours keeps what it freed, the peer's is as glibc has it.
Before each turn that is set, and an untimed step fills the memory anew.

The second case begins with JPEGs of 500 x 375 pixels in memory, whose views the same process makes: ours by
the training loader, the peer's by torchvision's transforms as DINO composes them.
"""

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial

import timm
import torch
from published import PairLoss, PublishedHead, adamw_loop, clip_loop, ema_loop
from published_views import MEAN, STD, dino_transform
from side_by_side import Case, main
from timm.models.xcit import checkpoint_filter_fn
from torch import Tensor, nn
from views import compared, jpegs, loaded, transformed

from nestling.ssl import allocator, optim
from nestling.ssl.config import Backbone, Config, Head
from nestling.ssl.distillation import Network, SelfDistillation
from nestling.ssl.schedules import StepValues
from nestling.ssl.views.render import normalize

NAME, MAX_NORM, TOLERANCE = "xcit_tiny_12_p16", 3.0, 1e-5
VALUES = StepValues(
    lr=5e-4,
    weight_decay=0.04,
    momentum=0.996,
    temperature=0.04,
    last_layer_frozen=False,
    backbone_frozen=False,
)


class Ours:
    """One step as `ssl.training` takes it."""

    def __init__(self, config: Config, device: torch.device) -> None:
        torch.manual_seed(0)
        self.method = SelfDistillation(config).to(device)
        self.optimizer = optim.build(config.optim, optim.parameter_groups(self.method.student))
        self.config = config

    def step(self, views: list[Tensor], batch_size: int) -> Tensor:
        """Shape: per size of views (V * B, 3, S, S) -> the loss, ()."""
        optim.apply(self.optimizer, VALUES)
        targets = self.method.targets(views[0], batch_size)
        outputs = self.method.student(views, batch_size)
        loss, _ = self.method.loss(outputs, targets, VALUES.temperature)
        loss.backward()
        optim.clip(self.method.student.parameters(), "per_parameter", MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.method.update_teacher(VALUES.momentum)
        return loss.detach()


class PublishedNetwork(nn.Module):
    """timm's backbone on each size of views, then the head on all of them: holding our network's weights."""

    def __init__(self, ours: Network, config: Config) -> None:
        super().__init__()
        head, state = config.head, ours.head.state_dict()
        self.backbone = timm.create_model(f"{NAME}_224", num_classes=0, **config.backbone.options)
        self.backbone.load_state_dict(checkpoint_filter_fn(ours.backbone.state_dict(), self.backbone))
        self.head = PublishedHead(
            ours.backbone.embed_dim, head.num_prototypes, head.hidden_dim, head.bottleneck_dim
        )
        kinds = {"weight_g": "original0", "weight_v": "original1"}
        for ours_, theirs in kinds.items():
            weight = state.pop(f"last_layer.{ours_}")
            state[f"last_layer.parametrizations.weight.{theirs}"] = weight
        self.head.load_state_dict(state)

    def forward(self, views: list[Tensor]) -> Tensor:
        return self.head(torch.cat([self.backbone.forward_features(images)[:, 0] for images in views]))


class Published:
    """The same step as the paper's recipe takes it; there biases and norms alone are spared from decay."""

    def __init__(self, ours: Ours, device: torch.device) -> None:
        config = ours.config
        self.student = PublishedNetwork(ours.method.student, config).to(device).train()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.loss = PairLoss(config.head.num_prototypes).to(device)
        learning = [parameter for parameter in self.student.parameters() if parameter.requires_grad]
        groups = [
            {
                "params": [parameter for parameter in learning if (parameter.ndim > 1) == decays],
                "decays": decays,
            }
            for decays in (True, False)
        ]
        self.optimizer = adamw_loop(groups)

    def step(self, views: list[Tensor]) -> Tensor:
        """Shape: the same."""
        optim.apply(self.optimizer, VALUES)
        with torch.no_grad():
            teacher = self.teacher(views[:1])
        loss = self.loss(self.student(views), teacher, VALUES.temperature)
        self.optimizer.zero_grad()
        loss.backward()
        clip_loop(self.student.parameters(), MAX_NORM)
        self.optimizer.step()
        ema_loop(self.teacher.parameters(), self.student.parameters(), VALUES.momentum)
        return loss.detach()


def config_of(quick: bool) -> Config:
    """The networks named above, or small ones."""
    if not quick:
        return Config(backbone=Backbone(NAME, drop_path=0.0))
    options = {"embed_dim": 32, "depth": 2, "num_heads": 2}
    return Config(backbone=Backbone(NAME, 0.0, options), head=Head(num_prototypes=512, hidden_dim=64))


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """The step alone, then with its views; the check takes steps of training, whose losses must agree."""
    batch_size, sides = (4, (64, 32)) if quick else (8, (224, 96))
    draw = torch.Generator().manual_seed(0)
    views = [
        torch.randn(count * batch_size, 3, side, side, generator=draw).to(device)
        for count, side in zip((2, 8), sides, strict=True)
    ]
    ours = Ours(config_of(quick), device)
    peer = Published(ours, device)
    rounds = 2 if quick else 7
    alike = partial(check, config_of(quick), views, batch_size)
    steps = partial(ours.step, views, batch_size), partial(peer.step, views)
    yield case("whole step", "timm, pair loss, parameter loops", *steps, alike, rounds)
    contents = jpegs(500, 375) * (batch_size // 4)
    load, transform = loaded(contents), transformed(contents, dino_transform())

    def from_files() -> Tensor:
        return ours.step([normalize(group.to(device), MEAN, STD) for group in load()], batch_size)

    def published_from_files() -> Tensor:
        by_view = [torch.stack(images) for images in zip(*transform(), strict=True)]
        return peer.step([torch.cat(group).to(device) for group in (by_view[:2], by_view[2:])])

    def check_both() -> None:
        alike()
        compared(contents[:4], transform)

    steps = from_files, published_from_files
    yield case("whole step with its views", "the same, torchvision v1", *steps, check_both, rounds)


def case(
    part: str,
    peer: str,
    ours: Callable[[], Tensor],
    theirs: Callable[[], Tensor],
    check: Callable[[], object],
    rounds: int,
) -> Case:
    """Each side under the allocator of its own training."""

    def keeping() -> None:
        allocator.keep_freed()
        ours()

    def as_published() -> None:
        allocator.as_usual()
        allocator.give_back()
        theirs()

    return Case(
        *(f"{part}, XCiT-T12/16, fp32", peer, ours, theirs, check),
        at_least=1.3,
        rounds=rounds,
        warm_up=False,  # which each turn has
        before_ours=keeping,
        before_theirs=as_published,
    )


def check(config: Config, views: list[Tensor], batch_size: int) -> None:
    """Raises AssertionError unless the losses of two steps agree; the second follows both updates.

    Of networks of its own, as those that are timed learn from views of their own.
    """
    ours = Ours(config, views[0].device)
    peer = Published(ours, views[0].device)
    for number in (1, 2):
        loss, published = ours.step(views, batch_size).item(), peer.step(views).item()
        if not math.isclose(loss, published, rel_tol=TOLERANCE):
            raise AssertionError(f"loss {number} is {loss:.7g}, as published {published:.7g}")


if __name__ == "__main__":
    main(cases, __doc__)
