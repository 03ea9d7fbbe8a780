"""Small backbones of each family, as exports take them."""

import torch
from safetensors.torch import save_file

from nestling import backbones
from nestling.ssl.command_line import write
from nestling.ssl.config import Backbone, Config, Data, Views
from nestling.ssl.export.differences import stirred
from nestling.ssl.export.subject import Subject

SMALL = {
    "xcit": ("xcit_nano_12_p16", {"embed_dim": 32, "depth": 2, "num_heads": 2, "cls_depth": 1}),
    "vit": ("vit_tiny_p16", {"embed_dim": 32, "depth": 2, "num_heads": 2, "position_size": 64}),
    "swin": ("swin_tiny_w7", {"embed_dim": 16, "depth": 2, "num_heads": 1}),
}
SIDE = 64
MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]


def small(family: str, seed: int = 0, **options) -> Subject:
    """A backbone of a family with random weights everywhere, statistics included."""
    torch.manual_seed(seed)
    name, given = SMALL[family]
    given = {**given, **options}
    backbone = stirred(backbones.create(name, **given), seed)
    return Subject(backbone, given, MEAN, STD, SIDE, network="teacher", step=7, checkpoint="RUN")


def write_run(folder, family: str):
    """A run directory with one checkpoint of a small backbone, as pretraining leaves it."""
    checkpoint = folder / "checkpoints/step_00000007"
    checkpoint.mkdir(parents=True)
    name, options = SMALL[family]
    for seed, network in enumerate(("teacher", "student")):
        state = small(family, seed).backbone.state_dict()
        tensors = {f"backbone.{key}": value for key, value in state.items()}
        save_file(tensors, checkpoint / f"{network}.safetensors")
    config = Config(
        data=Data(mean=MEAN, std=STD),
        backbone=Backbone(name, options=options),
        views=Views(global_size=[SIDE, 32]),
    )
    write(config, checkpoint / "config.yaml")
    (checkpoint / "trainer.json").write_text('{"step": 7}')
    return folder
