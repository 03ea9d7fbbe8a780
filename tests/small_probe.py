"""A run with one checkpoint of a tiny network, and labelled images to probe it on."""

from pathlib import Path

import torch
from image_folder import write_image_folder
from safetensors.torch import save_file

from nestling import backbones
from nestling.ssl.command_line import write
from nestling.ssl.config import Backbone, Config, Data, Views
from nestling.ssl.data.sources.opening import open_pair
from nestling.ssl.evaluation.linear.settings import Linear
from nestling.ssl.evaluation.linear.task import Task, prepared
from nestling.ssl.trained import load_trained

NAME = "xcit_nano_12_p4"


def write_probe(folder: Path, classes: int = 6, per_class: int = 5, depth: int = 4) -> Path:
    """folder/train, folder/val with one class more, and folder/run, which is returned."""
    write_image_folder(folder / "train", classes, per_class, size=20)
    write_image_folder(folder / "val", classes + 1, 3, size=20, seed=1)
    checkpoint = folder / "run/checkpoints/step_00000007"
    checkpoint.mkdir(parents=True)
    torch.manual_seed(0)
    options = {"embed_dim": 16, "depth": depth, "num_heads": 2}
    state = backbones.create(NAME, **options).state_dict()
    save_file({f"backbone.{key}": value for key, value in state.items()}, checkpoint / "teacher.safetensors")
    config = Config(
        data=Data(train=str(folder / "train"), val=str(folder / "val"), num_workers=0, max_bad_share=0.5),
        backbone=Backbone(NAME, 0.1, options),
        views=Views(global_size=[16]),
    )
    write(config, checkpoint / "config.yaml")
    return folder / "run"


def task_of(run: Path, **settings: object) -> Task:
    """A probe of that run on the CPU, in this process."""
    trained = load_trained(run)
    linear = Linear(**settings)  # type: ignore[arg-type]
    return prepared(trained, *open_pair(trained.config), linear, torch.device("cpu"))
