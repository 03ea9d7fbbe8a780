"""What is fine-tuned, and the file it becomes: a backbone and a linear classifier that knows its classes.

Shapes used below: B images, C channels, D the width of the read-out, K classes.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from nestling import backbones
from nestling.backbones import Backbone
from nestling.ssl.data.channels import backbone_options, channels, normalisation
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.features import untouched
from nestling.ssl.evaluation.finetuning.files import file_of, read_head, write_network
from nestling.ssl.evaluation.readouts import last_blocks, readout
from nestling.ssl.names import printable
from nestling.ssl.trained import Trained

HEAD_STD = 0.02  # as all linear layers of DeiT


class Classifier(nn.Module):
    """A linear layer on a read-out of the backbone.

    Shape:
        images: (B, C, H, W) -> logits (B, K) float32
    """

    def __init__(self, backbone: Backbone, name: str, width: int, num_classes: int) -> None:
        super().__init__()
        self.backbone, self.readout = backbone, readout(name)
        self.head = nn.Linear(width, num_classes)
        nn.init.trunc_normal_(self.head.weight, std=HEAD_STD)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.readout(last_blocks(self.backbone, images, [self.readout]))).float()


def rebuilt(trained: Trained, drop_path: float, **more: Any) -> Backbone:
    """The trained backbone built anew with that drop path and `more` options, to be trained on.

    What `more` adds keeps its fresh weights.

    Raises:
        UserError: the network can't be built so.
    """
    config = trained.config
    options = {**backbone_options(config), **more, "drop_path": drop_path}
    try:
        backbone = backbones.create(config.backbone.name, **options)
    except ValueError as error:
        raise UserError(f"{trained.title} can't be built with drop_path={drop_path}: {error}") from error
    missing, unexpected = backbone.load_state_dict(trained.backbone.state_dict(), strict=False)
    assert not unexpected, unexpected
    assert not missing or more, missing
    return backbone


def classifier(trained: Trained, name: str, drop_path: float, size: int, num_classes: int) -> Classifier:
    """The backbone under a fresh classifier, without gradients for what the classifier never sees.

    Raises:
        UserError: an unknown read-out, or images of that size don't go through.
    """
    backbone = rebuilt(trained, drop_path)
    images = torch.zeros(1, channels(trained.config.data), size, size)
    wanted = readout(name)
    with untouched(backbone), torch.no_grad():
        backbone.eval()
        width = wanted(last_blocks(backbone, images, [wanted])).shape[1]
    network = Classifier(backbone, name, width, num_classes)
    freeze_unused(network, images)
    return network


def freeze_unused(network: nn.Module, images: Tensor) -> list[str]:
    """Take the gradient from parameters that no output depends on; returns their names.

    Such as a mask token: several processes would wait for its gradient for ever.
    """
    with untouched(network):
        network.eval()
        network(images).sum().backward()
    unused = [name for name, p in network.named_parameters() if p.requires_grad and p.grad is None]
    for name in unused:
        network.get_parameter(name).requires_grad_(False)
    network.zero_grad(set_to_none=True)
    return unused


def facts_of(trained: Trained, size: int, crop_ratio: float, **head: Any) -> dict[str, Any]:
    """What builds a network again and prepares its images, as the metadata of its file say it."""
    config = trained.config
    mean, std = normalisation(config.data)
    return {
        "backbone": {"name": config.backbone.name, "options": backbone_options(config)},
        "mean": list(mean),
        "std": list(std),
        "side": size,
        "crop_ratio": crop_ratio,
        "head": head,
    }


def save(path: Path, network: nn.Module, facts: dict[str, Any]) -> None:
    """Write backbone and head as one file, whole or not at all.

    Raises:
        UserError: it can't be written.
    """
    write_network(path, network.state_dict(), facts)


class LoadedClassifier(NamedTuple):
    """A fine-tuned network in evaluation mode, the names of its classes, and how its images are prepared."""

    network: Classifier
    class_names: list[str]
    facts: dict[str, Any]


def load_classifier(path: str | Path) -> LoadedClassifier:
    """The network that a fine-tuning left in a folder, or in its file.

    `backbones.load` of the same path loads its backbone alone.

    Raises:
        UserError: nothing of the kind is there.
    """
    file = file_of(path)
    try:
        facts, tensors = read_head(file)
        head = facts["head"]
        backbone = backbones.load(file).backbone
        num_classes, width = tensors["head.weight"].shape
        network = Classifier(backbone, head["readout"], width, num_classes)
        network.load_state_dict({**network.state_dict(), **tensors})
    except (OSError, SafetensorError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{printable(file)} holds no fine-tuned classifier ({error!r})") from error
    return LoadedClassifier(network.eval(), list(head["classes"]), facts)
