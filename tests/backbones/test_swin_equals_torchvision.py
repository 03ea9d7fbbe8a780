"""Swin against torchvision with the same weights, in float64."""

import pytest
import torch
from torch import Tensor, nn

from nestling import backbones
from nestling.backbones.windows import relative_position_index

models = pytest.importorskip("torchvision.models")
swin_transformer = pytest.importorskip("torchvision.models.swin_transformer")

TWINS = {"swin_tiny_w7": "swin_t", "swin_small_w7": "swin_s", "swin_base_w7": "swin_b"}


def their_key(key: str) -> str:
    """Where torchvision keeps one of our tensors: stages and mergings are numbered in one list."""
    if key.startswith("patch_embed."):
        return key.replace("patch_embed.proj", "features.0.0").replace("patch_embed.norm", "features.0.2")
    if not key.startswith("layers."):
        return key
    _, stage, part, *rest = key.split(".")
    if part == "downsample":
        return f"features.{2 * int(stage) + 2}.{'.'.join(rest)}"
    name = ".".join(rest).replace("mlp.fc1", "mlp.0").replace("mlp.fc2", "mlp.3")
    return f"features.{2 * int(stage) + 1}.{name}"


def twins(theirs: nn.Module, name: str, **options) -> tuple[backbones.Backbone, nn.Module]:
    """Ours, and torchvision's model holding our weights, each of them moved off its initial value."""
    torch.manual_seed(0)
    ours, theirs = backbones.create(name, **options).double(), theirs.double()
    theirs.head = nn.Identity()
    with torch.no_grad():
        for tensor in ours.parameters():
            tensor += 0.1 * torch.rand_like(tensor)
    state = {their_key(key): tensor for key, tensor in ours.state_dict().items()}
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert unexpected == []
    assert {key.rpartition(".")[2] for key in missing} == {"relative_position_index"}
    return ours.eval(), theirs.eval()


def largest_difference(ours: backbones.Backbone, theirs: nn.Module, images: Tensor) -> float:
    features = ours(images)
    patches = theirs.norm(theirs.features(images)).flatten(1, 2)
    return max((features.cls - theirs(images)).abs().max(), (features.patches - patches).abs().max())


def small(window: int, **options) -> tuple[backbones.Backbone, nn.Module]:
    theirs = models.SwinTransformer([4, 4], 16, [2, 2, 2, 2], [1, 2, 4, 8], [window, window])
    name = f"swin_tiny_w{window}"
    return twins(theirs, name, embed_dim=16, depth=2, num_heads=1, **options)


@torch.no_grad()
@pytest.mark.parametrize("size", [(224, 224), (96, 96), (64, 128), (100, 100), (160, 160), (4, 4), (36, 300)])
@pytest.mark.parametrize("window", [7, 14])
def test_attended_padding_equals_torchvision_at_any_size(window, size):
    ours, theirs = small(window, padding="attended")
    assert largest_difference(ours, theirs, torch.randn(2, 3, *size).double()) < 1e-9


@torch.no_grad()
@pytest.mark.parametrize(("window", "size"), [(7, (224, 224)), (14, (448, 448)), (7, (224, 448))])
def test_masked_padding_equals_torchvision_where_no_grid_is_padded(window, size):
    ours, theirs = small(window, padding="masked")
    assert largest_difference(ours, theirs, torch.randn(1, 3, *size).double()) < 1e-9


@torch.no_grad()
def test_masked_padding_differs_where_a_grid_is_padded():
    ours, theirs = small(7, padding="masked")
    assert largest_difference(ours, theirs, torch.randn(1, 3, 96, 96).double()) > 1e-3


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "padding", "sizes"),
    [
        ("swin_tiny_w7", "masked", [(224, 224)]),
        ("swin_tiny_w7", "attended", [(224, 224), (64, 128)]),
        ("swin_small_w7", "attended", [(100, 100)]),
        ("swin_base_w7", "attended", [(100, 100)]),
    ],
)
def test_published_models_equal_torchvision(name, padding, sizes):
    ours, theirs = twins(getattr(models, TWINS[name])(), name, padding=padding)
    for size in sizes:
        assert largest_difference(ours, theirs, torch.randn(1, 3, *size).double()) < 1e-9, size


def test_gradients_equal_torchvision():
    ours, theirs = small(7, padding="attended")
    images, direction = torch.randn(2, 3, 64, 100).double(), torch.randn(2, 128).double()
    (ours(images).cls * direction).sum().backward()
    (theirs(images) * direction).sum().backward()
    their_parameters = dict(theirs.named_parameters())
    for key, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, their_parameters[their_key(key)].grad, rtol=0, atol=1e-9, msg=key
        )


@pytest.mark.parametrize("window", [3, 7, 14])
def test_the_index_of_the_bias_table_equals_torchvisions(window):
    layer = swin_transformer.ShiftedWindowAttention(4, [window, window], [0, 0], 2)
    ours = relative_position_index((window, window), window, torch.device("cpu"))
    assert torch.equal(ours.flatten(), layer.relative_position_index)


@pytest.mark.parametrize("name", TWINS)
def test_parameter_counts_equal_torchvision(name):
    with torch.device("meta"):
        ours, theirs = backbones.create(name), getattr(models, TWINS[name])(num_classes=1)
    assert sum(p.numel() for p in ours.parameters()) == sum(
        p.numel() for key, p in theirs.named_parameters() if not key.startswith("head.")
    )
