"""A backbone as a graph whose batch, height and width stay free.

Shapes used below: B images, C channels, D features, N patches.
"""

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from nestling.backbones import Backbone
from nestling.ssl.errors import UserError
from nestling.ssl.export.sizes import Size, two_sizes, unit
from nestling.ssl.export.subject import Subject

AXES = ("batch", "height", "width")


class Outputs(nn.Module):
    """A backbone that returns two tensors, as a graph's outputs must be.

    Shape:
        images: (B, C, H, W) -> cls (B, D), patches (B, N, D)
    """

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.backbone(images)
        return features.cls, features.patches


def smallest_side(backbone: Backbone) -> int:
    """The height and width from which a graph holds.

    The tracer tells an axis of length 1 from all others, so the smallest grid is 2 x 2.
    """
    step = unit(backbone)
    return backbone.stride + 1 if step == 1 else 2 * step


def graph_sizes(subject: Subject) -> list[Size]:
    """Two sizes that a graph takes."""
    return two_sizes(subject.backbone, max(subject.side, smallest_side(subject.backbone)))


def traced(subject: Subject) -> ExportedProgram:
    """The graph of a forward pass over images of any number and size.

    Raises:
        UserError: the network's code can't be traced so.
    """
    backbone = subject.backbone
    step, smallest, stride = unit(backbone), smallest_side(backbone), backbone.stride
    patches = -(-smallest // stride) + 2  # of an example unlike the smallest, and not square
    images = torch.zeros(2, len(subject.mean), patches * stride, (patches + 1) * stride)

    def side(name: str) -> Dim:
        return Dim(name, min=smallest) if step == 1 else step * Dim(f"{name}_patches", min=smallest // step)

    shapes = {"images": {0: Dim("batch"), 2: side("height"), 3: side("width")}}
    try:
        with torch.no_grad():
            return torch.export.export(Outputs(backbone).eval(), (images,), dynamic_shapes=shapes)
    except Exception as error:  # torch names no type for what can't be traced
        said = str(error).strip().splitlines()[0]
        raise UserError(
            f"{backbone.name} can't be traced with free batch, height and width ({said}); "
            "another target, such as --to nestling, takes it"
        ) from error
