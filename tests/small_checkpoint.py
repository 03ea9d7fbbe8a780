"""A checkpoint of a few numbers, all of which say its step."""

import torch

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
