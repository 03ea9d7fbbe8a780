"""A run directory with one checkpoint of a tiny network, whose teacher and student differ, and its images."""

import json
from pathlib import Path

import torch
from image_folder import write_image_folder
from safetensors.torch import save_file

from nestling import backbones
from nestling.ssl.command_line import write
from nestling.ssl.config import Backbone, Config, Data, Knn, Views

OPTIONS = {"embed_dim": 16, "depth": 1, "num_heads": 2}


def write_trained(folder: Path, name: str = "xcit_nano_12_p4", **options: object) -> Path:
    """The folder `run`, beside the images `train` and `val`; `run/bare.safetensors` is a weights file."""
    options = OPTIONS | options
    write_image_folder(folder / "train", classes=4, per_class=6)
    write_image_folder(folder / "val", classes=4, per_class=4, seed=1)
    checkpoint = folder / "run/checkpoints/step_00000007"
    checkpoint.mkdir(parents=True)
    for seed, network in enumerate(("teacher", "student")):
        torch.manual_seed(seed)
        state = backbones.create(name, **options).state_dict()
        prefixed = {f"backbone.{key}": value for key, value in state.items()}
        save_file(prefixed, checkpoint / f"{network}.safetensors")
    facts = {"backbone": {"name": name, "options": options}, "side": 32}
    save_file(state, folder / "run/bare.safetensors", {"nestling": json.dumps(facts)})
    config = Config(
        data=Data(train=str(folder / "train"), val=str(folder / "val"), num_workers=0),
        backbone=Backbone(name, 0.1, options),
        views=Views(global_size=[32]),
        knn=Knn(k=[5, 1], pooling=["cls", "mean_patch"]),
    )
    write(config, checkpoint / "config.yaml")
    return folder / "run"
