"""What is refused before the first step, by a step that leaves no trace."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from nestling.backbones import Features
from nestling.backbones.registry import _REGISTRY, register
from nestling.backbones.xcit import XCiT
from nestling.ssl import config as schema
from nestling.ssl.config import Config
from nestling.ssl.distillation import SelfDistillation
from nestling.ssl.errors import UserError
from nestling.ssl.run.guards import try_a_step


class WithSpares(XCiT):
    """An XCiT with layers that no one uses, and one that is used without learning."""

    def __init__(
        self, name: str, embed_dim: int, depth: int, num_heads: int, drop_path: float, spares: int = 1
    ) -> None:
        super().__init__(name, 3, 4, embed_dim, depth, num_heads, drop_path=drop_path)
        self.spares = nn.ModuleList(nn.Linear(4, 4) for _ in range(spares))
        self.fixed = nn.Linear(embed_dim, embed_dim).requires_grad_(False)

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Features:
        features = super().forward(images, mask)
        return Features(self.fixed(features.cls), features.patches, features.grid)


@pytest.fixture(autouse=True)
def own_backbone() -> Iterator[None]:
    register({"with_spares": {}})(WithSpares)
    yield
    _REGISTRY.pop("with_spares")


def config(name: str = "xcit_nano_12_p4", batch_size: int = 8, num_local: int = 2, local: int = 8) -> Config:
    options = {"embed_dim": 16, "depth": 1, "num_heads": 2}
    return Config(
        backbone=schema.Backbone(name, 0.1, options),
        head=schema.Head(num_prototypes=24, hidden_dim=16, bottleneck_dim=8),
        views=schema.Views(global_size=[16, 20], num_local=num_local, local_size=[local, 12]),
        train=schema.Train(batch_size=batch_size),
    )


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_step_that_is_tried_leaves_no_trace(dtype):
    settings = config()
    torch.manual_seed(0)
    method = SelfDistillation(settings)
    before = {name: tensor.clone() for name, tensor in [*method.named_parameters(), *method.named_buffers()]}
    random = torch.get_rng_state()
    try_a_step(method, settings, dtype)
    after = dict([*method.named_parameters(), *method.named_buffers()])
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert any(name.endswith("num_batches_tracked") for name in before)
    assert any(name.endswith("center.total") for name in before), "those that are not saved too"
    assert all(parameter.grad is None for parameter in method.parameters())
    assert torch.equal(torch.get_rng_state(), random)


FIRST = ("spares.0.weight", "spares.0.bias", "spares.1.weight")


@pytest.mark.parametrize(
    ("spares", "told"), [(1, ", ".join(FIRST[:2]) + ":"), (2, ", ".join(FIRST) + " and 1 more:")]
)
def test_parameters_that_no_gradient_reaches_are_named(spares, told):
    settings = config("with_spares")
    settings.backbone.options["spares"] = spares
    with pytest.raises(UserError, match="no gradient reaches " + told.replace("spares", r"backbone\.spares")):
        try_a_step(SelfDistillation(settings), settings)


def test_a_single_value_for_a_batch_norm_is_refused_with_what_to_raise():
    settings = config(batch_size=1, num_local=1, local=4)
    with pytest.raises(
        UserError, match=r"train\.batch_size=1 with views\.num_local=1 and views\.local_size=\[4, 12\]"
    ):
        try_a_step(SelfDistillation(settings), settings)


@pytest.mark.parametrize("larger", [{"batch_size": 2}, {"num_local": 2}, {"num_local": 0}, {"local": 8}])
def test_two_values_are_enough(larger):
    settings = config(**{"batch_size": 1, "num_local": 1, "local": 4, **larger})
    try_a_step(SelfDistillation(settings), settings)
