"""A checkpoint of a few numbers, all of which say its step, and a run that makes small ones."""

from pathlib import Path

import torch

from nestling.ssl import config as schema
from nestling.ssl.config import Config
from nestling.ssl.run.checkpoints import Checkpoint


def small_checkpoint(step: int, numbers: int = 6, kept: bool = False) -> Checkpoint:
    """`numbers` per network; the student's are the step, the teacher's one more."""
    weights = {"backbone.w": torch.full((numbers,), float(step))}
    return Checkpoint(
        student=weights,
        teacher={key: value + 1 for key, value in weights.items()},
        terms={"dino.center.center": torch.arange(4.0)},
        optimizer={
            "state": {0: {"exp_avg": torch.full((numbers,), float(step)), "exp_avg_sq": torch.ones(numbers)}},
            "param_groups": [{"lr": 0.1, "params": [0]}],
        },
        trainer={"step": step, "global_batch": 8, "best": None, "kept": kept, "scaler": None},
        config="seed: 3\nbackbone: {name: xcit_nano_12_p4, options: {depth: 2}}\n",
    )


def small_run(out: Path, **train: object) -> Config:
    """On the folder `images` beside `out`, without k-NN."""
    return Config(
        out=str(out),
        data=schema.Data(train=str(out.parent / "images"), num_workers=0, holdout=0.25),
        backbone=schema.Backbone(
            "xcit_nano_12_p4", 0.1, options={"embed_dim": 16, "depth": 1, "num_heads": 2}
        ),
        views=schema.Views(global_size=[16], num_local=2, local_size=[8]),
        head=schema.Head(num_prototypes=24, hidden_dim=16, bottleneck_dim=8),
        teacher=schema.Teacher(temperature_warmup_epochs=0),
        optim=schema.Optim(lr=1e-3, lr_scaling="none", warmup_epochs=0),
        train=schema.Train(**{"epochs": 4, "batch_size": 4, "precision": "fp32", "keep_last": 9, **train}),
        knn=schema.Knn(every=0),
        log=schema.Log(every=1, progress="none"),
    )
