"""ViT as a graph: compiled, exported and run by onnxruntime, at sizes it wasn't traced at."""

import pytest
import torch
from torch import Tensor, nn

from nestling import backbones
from nestling.backbones.vit import ViT


def tiny(**options) -> ViT:
    torch.manual_seed(0)
    sizes = {"embed_dim": 32, "depth": 1, "num_heads": 2, "position_size": 64}
    model = backbones.create("vit_tiny_p16", **{**sizes, **options})
    assert isinstance(model, ViT)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("position", ["learned", "sincos2d", "rope", "none"])
def test_it_compiles_without_a_graph_break(position):
    options = {"depth": 2, "drop_path": 0.1, "layer_scale": 0.5, "registers": 1}
    options |= {"rope_shift": 0.5} if position == "rope" else {}
    model = tiny(position=position, **options)
    compiled, images = torch.compile(model, fullgraph=True, backend="aot_eager"), torch.randn(2, 3, 48, 32)
    compiled(images).cls.sum().backward()
    model.eval()
    torch.testing.assert_close(compiled(images).patches, model(images).patches, rtol=0, atol=1e-5)


EXPORTED = [
    {},
    {"interpolate_offset": 0.1},
    {"interpolate_antialias": True},
    {"position": "sincos2d"},
    {"position": "rope", "registers": 2},
]
SIZES = [(1, 64, 64), (3, 32, 112), (2, 96, 64)]


def dynamic() -> dict[str, dict[int, object]]:
    batch, height, width = (torch.export.Dim(name) for name in ("batch", "height", "width"))
    return {"images": {0: batch, 2: 16 * height, 3: 16 * width}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "traced_at"),  # at a grid of its own, and where there is a table at the table's too
    [*((options, (48, 80)) for options in EXPORTED), *((options, (64, 64)) for options in EXPORTED[:3])],
)
def test_an_exported_graph_serves_every_size(options, traced_at):
    model = tiny(**options).eval()
    exported = torch.export.export(model, (torch.randn(2, 3, *traced_at),), dynamic_shapes=dynamic()).module()
    for batch, *size in SIZES:
        images = torch.randn(batch, 3, *size)
        ours, theirs = model(images), exported(images)
        torch.testing.assert_close(theirs[0], ours.cls, rtol=0, atol=1e-6)
        torch.testing.assert_close(theirs[1], ours.patches, rtol=0, atol=1e-6)


class PatchesAlone(nn.Module):
    def __init__(self, backbone: ViT) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor) -> Tensor:
        return self.backbone(images).patches


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # onnx's converter warns of its own use of torch
def test_onnxruntime_gives_the_same_features_at_every_size(tmp_path):
    """With rotations; tests/ssl/export/test_export_graphs.py has it run a ViT of learned positions."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model = tiny(**EXPORTED[-1]).eval()
    program = torch.onnx.export(
        PatchesAlone(model).eval(),
        (torch.randn(2, 3, 48, 80),),
        dynamo=True,
        dynamic_shapes=dynamic(),
        verbose=False,
    )
    program.save(tmp_path / "vit.onnx")
    session = runtime.InferenceSession(tmp_path / "vit.onnx")
    for batch, *size in SIZES:
        images = torch.randn(batch, 3, *size)
        (theirs,) = session.run(None, {"images": images.numpy()})
        torch.testing.assert_close(torch.from_numpy(theirs), model(images).patches, rtol=0, atol=1e-5)
