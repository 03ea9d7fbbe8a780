"""Small backbones of each family, and foreign ones, as exports take them."""

import torch
from torch import Tensor, nn

from nestling import backbones
from nestling.ssl.command_line import write
from nestling.ssl.config import Backbone, Config, Data, Views
from nestling.ssl.export.differences import stirred
from nestling.ssl.export.subject import Subject
from nestling.ssl.run import checkpoints

SMALL = {
    "xcit": ("xcit_nano_12_p16", {"embed_dim": 32, "depth": 2, "num_heads": 2, "cls_depth": 1}),
    "vit": ("vit_tiny_p16", {"embed_dim": 32, "depth": 2, "num_heads": 2, "position_size": 64}),
    "swin": ("swin_tiny_w7", {"embed_dim": 16, "depth": 2, "num_heads": 1}),
}
FOREIGN = {
    "custom": ("export_subjects:Patches", {}),
    "timm": ("timm:resnet10t", {}),
    "torchvision": ("torchvision:resnet18", {}),
}
SIDE = 64
MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]


class Patches(nn.Module):
    """A user's own network."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 16, 8, stride=8)

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(images)


def small(family: str, seed: int = 0, **options) -> Subject:
    """A backbone of a family with random weights everywhere, statistics included."""
    torch.manual_seed(seed)
    name, given = (SMALL | FOREIGN)[family]
    given = {**given, **options}
    backbone = stirred(backbones.create(name, **given), seed)
    return Subject(backbone, given, MEAN, STD, SIDE, network="teacher", step=7, checkpoint="step_00000007")


def write_run(folder, family: str):
    """A run directory with one checkpoint of a small backbone, as pretraining leaves it."""
    folder.mkdir(parents=True)
    name, options = (SMALL | FOREIGN)[family]
    config = Config(
        data=Data(mean=MEAN, std=STD),
        backbone=Backbone(name, options=options),
        views=Views(global_size=[SIDE, 32]),
    )
    write(config, folder / "config.yaml")
    teacher, student = (network_state(family, seed) for seed in range(2))
    text = (folder / "config.yaml").read_text(encoding="utf-8")
    content = checkpoints.Checkpoint(student, teacher, {}, {}, {"step": 7}, text)
    checkpoints.save(content, folder, keep_last=1, is_best=True)
    return folder


def network_state(family: str, seed: int) -> dict[str, Tensor]:
    """A backbone's tensors with one of a projection head, which exports leave behind."""
    state = small(family, seed).backbone.state_dict()
    return {
        **{f"backbone.{key}": value for key, value in state.items()},
        "head.last.weight": torch.ones(4, 2),
    }
