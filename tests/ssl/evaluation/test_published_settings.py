"""The defaults of the evaluations are the settings that were published with the protocols."""

from dataclasses import asdict
from typing import Any

import pytest

from nestling.recipes.eval_copy_detection import EvalCopyDetection
from nestling.recipes.eval_segmentation import EvalSegmentation
from nestling.recipes.eval_video import EvalVideo
from nestling.ssl.evaluation.dense.settings import Linear as DenseLinear
from nestling.ssl.evaluation.dense.settings import Propagation
from nestling.ssl.evaluation.linear.settings import RATES, Linear
from nestling.ssl.evaluation.retrieval import copies

PUBLISHED: list[tuple[str, type, dict[str, Any]]] = [
    ("DINO, eval_linear.py", Linear, {"epochs": 100, "momentum": 0.9, "scale": [0.08, 1.0], "flip": 0.5}),
    ("the images that DINO's rates are told for", Linear, {"batch_size": 256}),
    ("DINOv2, ADE20K linear", DenseLinear, {"steps": 40_000, "warmup_steps": 1_500, "lr": 1e-3}),
    ("DINOv2, ADE20K linear", DenseLinear, {"weight_decay": 1e-4, "batch_size": 16}),
    ("DINOv2, ADE20K linear: crops", EvalSegmentation, {"size": 512}),
    ("DINO, eval_video_segmentation.py", Propagation, {"last_frames": 7, "topk": 5}),
    ("DINO, eval_video_segmentation.py", Propagation, {"radius": 12, "temperature": 0.1}),
    ("DAVIS 2017 at 480p", EvalVideo, {"size": 480, "resolution": "480p", "split": "2017/val"}),
    ("DINO, eval_copy_detection.py", EvalCopyDetection, {"size": 320, "depth": 20}),
]


@pytest.mark.parametrize(("source", "settings", "expected"), PUBLISHED)
def test_a_default_is_what_was_published(source, settings, expected):
    found = asdict(settings())
    assert {name: found[name] for name in expected} == expected, source


def test_the_grid_of_learning_rates_is_that_of_dinov2():
    assert RATES == (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1)
    assert Linear().lr is None, "which stands for it"


def test_the_pooling_of_copies_is_that_of_dino():
    assert copies.POWER == 4
