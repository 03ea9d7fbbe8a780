"""Swin as a graph: compiled and exported, at sizes it wasn't traced at.

tests/ssl/export/test_export_graphs.py has it run by onnxruntime.
"""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

from nestling import backbones
from nestling.backbones.swin import Swin
from nestling.backbones.window_attention import WindowAttention


def tiny(**options) -> Swin:
    torch.manual_seed(0)
    sizes = {"embed_dim": 6, "depth": 1, "num_heads": 3}
    model = backbones.create("swin_tiny_w7", **{**sizes, **options})
    assert isinstance(model, Swin)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.rand_like(parameter)
    return model


class Plain(nn.Module):
    """The features as a tuple of tensors alone."""

    def __init__(self, backbone: Swin) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        cls, patches, _ = self.backbone(images)
        return cls, patches


@pytest.mark.slow
@pytest.mark.parametrize(("padding", "position"), [("masked", "none"), ("attended", "both")])
def test_the_whole_graph_compiles_at_several_sizes_and_trains_alike(padding, position):
    torch.compiler.reset()
    model = tiny(padding=padding, position=position, window=2, mask_token=True).double()
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    for size in [(64, 64), (36, 45)]:  # the second size would make them symbolic
        images, mask = torch.randn(2, 3, *size).double(), torch.ones(2, 2, 2, dtype=torch.bool).triu()
        expected, found = model(images, mask), compiled(images, mask)
        torch.testing.assert_close(found.patches, expected.patches, rtol=0, atol=1e-9)
        assert found.grid == expected.grid
        found.cls.sum().backward()


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_an_exported_layer_serves_every_grid(masked, shifted):
    torch.manual_seed(0)
    layer = WindowAttention(8, 2, 7, shifted, masked).double().eval()
    sizes = {1: Dim("height", min=2, max=99), 2: Dim("width", min=2, max=99)}
    exported = export(layer, (torch.randn(2, 20, 9, 8).double(),), dynamic_shapes=(sizes,)).module()
    for grid in [(20, 9), (7, 7), (7, 14), (2, 30), (8, 5)]:
        x = torch.randn(2, *grid, 8).double()
        torch.testing.assert_close(exported(x), layer(x), rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(4, 4), (50, 70)])
def test_an_export_at_one_size_gives_the_same_features(size):
    model, images = tiny(position="both").double().eval(), torch.randn(1, 3, *size).double()
    found, expected = export(Plain(model), (images,)).module()(images), Plain(model)(images)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def dynamic() -> dict[int, object]:
    return {0: Dim("batch"), 2: Dim("height", min=33, max=1024), 3: Dim("width", min=33, max=1024)}


@pytest.mark.slow
def test_an_exported_graph_serves_every_size_above_one_patch_of_the_last_stage():
    model = Plain(tiny(position="both").double().eval())
    images = torch.randn(2, 3, 240, 256).double()
    exported = export(model, (images,), dynamic_shapes=(dynamic(),)).module()
    for batch, *size in [(2, 224, 224), (1, 288, 256), (3, 64, 100), (1, 33, 301)]:
        images = torch.randn(batch, 3, *size).double()
        torch.testing.assert_close(exported(images), model(images), rtol=0, atol=1e-9)
