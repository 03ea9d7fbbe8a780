"""A backbone as a graph whose batch, height and width stay free; of a foreign network the batch alone.

Shapes used below: B images, C channels, D features, N patches.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from nestling.backbones import Backbone
from nestling.ssl.errors import UserError
from nestling.ssl.export.sizes import Size, two_sizes, unit
from nestling.ssl.export.subject import Subject
from nestling.ssl.export.target import own_size

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


def sides(subject: Subject) -> dict[str, int]:
    """What a graph says of the sizes that it takes: the smallest, or of a foreign network the only one."""
    if subject.is_built_in:
        return {"smallest_side": smallest_side(subject.backbone)}
    return {"only_side": subject.side}


def graph_sizes(subject: Subject) -> list[Size]:
    """Two sizes that a graph takes, or the only one."""
    if not subject.is_built_in:
        return own_size(subject)
    return two_sizes(subject.backbone, max(subject.side, smallest_side(subject.backbone)))


def traced(subject: Subject) -> ExportedProgram:
    """The graph of a forward pass over any number of images; `sides` says of what size.

    Raises:
        UserError: the network's code can't be traced so.
    """
    backbone = subject.backbone
    (height, width), free = example(subject)
    images = torch.zeros(2, len(subject.mean), height, width)
    try:
        with torch.no_grad():
            return torch.export.export(
                Outputs(backbone).eval(),
                (images,),
                dynamic_shapes={"images": {0: Dim("batch"), **free}},
                strict=not subject.is_built_in,  # else checks inside a foreign network pin the batch
            )
    except Exception as error:  # torch names no type for what can't be traced
        said = str(error).strip().splitlines()[0]
        axes = "batch, height and width" if free else f"batch at {height} x {width} pixels"
        raise UserError(
            f"{backbone.name} can't be traced with free {axes} ({said}); "
            "another target, such as --to nestling, takes it"
        ) from error


def example(subject: Subject) -> tuple[Size, dict[int, Any]]:
    """The size of images to trace with, and which of their axes 2 and 3 are free, within what bounds."""
    backbone = subject.backbone
    if not subject.is_built_in:
        return own_size(subject)[0], {}
    step, smallest, stride = unit(backbone), smallest_side(backbone), backbone.stride
    patches = -(-smallest // stride) + 2  # unlike the smallest, and not square

    def side(name: str) -> Dim:
        return Dim(name, min=smallest) if step == 1 else step * Dim(f"{name}_patches", min=smallest // step)

    return (patches * stride, (patches + 1) * stride), {2: side("height"), 3: side("width")}
