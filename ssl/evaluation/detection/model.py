"""A backbone under torchvision's Mask R-CNN, and the file that such a detector becomes.

Shapes used below: B images, C channels, D channels of the feature pyramid.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from nestling import backbones
from nestling.backbones import Backbone
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.features import untouched
from nestling.ssl.evaluation.finetuning.files import file_of, read_head, write_network
from nestling.ssl.names import printable

COARSEST = 32  # the largest stride of a pyramid
SHAPE = ("min_size", "max_size", "out_channels", "rois", "detections")  # what builds a detector again
BACKBONE = "backbone.backbone."  # where a detector keeps it


def divisor(backbone: Backbone) -> int:
    """What the sides of a batch are padded to multiples of: whole patches and whole cells of every level."""
    return math.lcm(COARSEST, backbone.stride)


class PyramidBackbone(nn.Module):
    """The backbone's maps at strides 4, 8, 16 and 32 through a feature pyramid network, and one of 64.

    In `autocast` where given; what comes out is float32.

    Shape:
        images: (B, C, H, W), sides that are multiples of `divisor` -> {"0", "1", "2", "3", "pool"}: (B, D, …)

    Raises:
        UserError: the backbone has no pyramid of such images.
    """

    def __init__(
        self, backbone: Backbone, in_chans: int, out_channels: int, autocast: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.backbone, self.out_channels, self.autocast = backbone, out_channels, autocast
        side = 2 * divisor(backbone)
        try:
            with untouched(backbone), torch.no_grad():
                backbone.eval()
                levels = backbone.pyramid(torch.zeros(1, in_chans, side, side))
        except ValueError as error:
            raise UserError(f"{backbone.name} can't be a detector's backbone: {error}") from error
        widths = [level.shape[1] for level in levels]
        self.fpn = FeaturePyramidNetwork(widths, out_channels, LastLevelMaxPool())

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        enabled = self.autocast is not None
        with torch.autocast(images.device.type, dtype=self.autocast, enabled=enabled):
            levels = self.backbone.pyramid(images)
            maps = self.fpn(OrderedDict((str(number), level) for number, level in enumerate(levels)))
        return OrderedDict((name, level.float()) for name, level in maps.items())


def mask_rcnn(
    backbone: Backbone,
    mean: Sequence[float],
    std: Sequence[float],
    num_classes: int,
    min_size: Sequence[int],
    max_size: int,
    out_channels: int,
    rois: int,
    detections: int,
    autocast: torch.dtype | None = None,
) -> MaskRCNN:
    """Mask R-CNN whose images in [0, 1] are normalised as the backbone's were; class 0 is the background.

    The sizes are those of `settings.Detector`.
    """
    pyramid = PyramidBackbone(backbone, len(mean), out_channels, autocast)
    return MaskRCNN(
        pyramid,
        num_classes + 1,
        min_size=tuple(min_size),
        max_size=max_size,
        image_mean=list(mean),
        image_std=list(std),
        size_divisible=divisor(backbone),
        box_batch_size_per_image=rois,
        box_detections_per_img=detections,
    )


def save(path: Path, network: MaskRCNN, facts: dict[str, Any]) -> None:
    """Write the detector as `backbone.…` and `head.…`: `backbones.load` finds its backbone.

    Raises:
        UserError: it can't be written.
    """
    tensors = {
        f"backbone.{name.removeprefix(BACKBONE)}" if name.startswith(BACKBONE) else f"head.{name}": value
        for name, value in network.state_dict().items()
    }
    write_network(path, tensors, facts)


class LoadedDetector(NamedTuple):
    """A detector in evaluation mode and the names of its classes, the first of which is label 1."""

    network: MaskRCNN
    class_names: list[str]


def load_detector(path: str | Path) -> LoadedDetector:
    """The detector that was trained into a folder, or its file.

    Raises:
        UserError: nothing of the kind is there.
    """
    file = file_of(path)
    try:
        facts, tensors = read_head(file)
        said = facts["head"]
        backbone = backbones.load(file).backbone
        shape = {name: said[name] for name in SHAPE}
        network = mask_rcnn(backbone, facts["mean"], facts["std"], len(said["classes"]), **shape)
        inside = {f"{BACKBONE}{name}": value for name, value in backbone.state_dict().items()}
        head = {name.removeprefix("head."): value for name, value in tensors.items()}
        network.load_state_dict({**inside, **head})
    except (OSError, SafetensorError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{printable(file)} holds no detector ({error!r})") from error
    return LoadedDetector(network.eval(), list(said["classes"]))
