"""Every leaf of the config changes something that the real code computes, writes or says.

Each `Effect` flips one key of a small run and looks at one thing; what it looks at repeats to the bit
under the same config, so a key that nothing reads fails here, and so does a new key without a line.
"""

import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from config_observers import (
    accuracies,
    beginning,
    checkpointed,
    compiled,
    console,
    files,
    full_disk,
    judged_images,
    learned,
    loader_processes,
    logged,
    operations,
    order,
    scanned,
    second_start,
    split,
    structure,
    views,
    warned,
)
from image_folder import texture, write_image_folder
from PIL import Image

from nestling import backbones
from nestling.ssl.command_line import read
from nestling.ssl.config import Config
from nestling.ssl.keys import keys_of
from nestling.ssl.validation import validate

Observer = Callable[[Config], object]

# 16 images of one class and 4 of another, 15 to train on: 3 steps in each of 2 epochs.
BASE = {
    "out": "{root}/run",
    "data.train": "{images}",
    "data.holdout": "0.25",
    "data.num_workers": "0",
    "backbone.name": "xcit_nano_12_p4",
    "backbone.drop_path": "0.1",
    "backbone.options": "{{embed_dim: 16, depth: 1, num_heads: 2, tokens_norm: true}}",
    "views.global_size": "16",
    "views.num_local": "2",
    "views.local_size": "8",
    "head.num_prototypes": "24",
    "head.hidden_dim": "16",
    "head.bottleneck_dim": "8",
    "teacher.momentum": "0.9",
    "teacher.temperature": "0.07",
    "teacher.temperature_warmup_epochs": "2",
    "optim.lr": "1e-2",
    "optim.warmup_epochs": "1",
    "train.epochs": "2",
    "train.batch_size": "5",
    "train.precision": "fp32",
    "knn.every": "0",
    "knn.k": "3",
    "log.every": "1",
    "log.progress": "none",
}


TINY = {"embed_dim": 16, "depth": 1, "num_heads": 2, "tokens_norm": True}


class Effect(NamedTuple):
    """`key=value` changes what `observer` sees of a run with the settings BASE and `given`."""

    key: str
    value: str
    observer: Observer
    given: Mapping[str, str] = {}


SGD = {"optim.name": "sgd"}
DIVERGING = {**SGD, "optim.lr": "1e38", "optim.lr_scaling": "none", "optim.clip_mode": "none"}
CLIPPED = {**SGD, "optim.clip": "1e-3"}
SOLARIZED = {"views.global_solarize": "[1, 1]"}
FORKED = {"data.num_workers": "1", "data.start_method": "fork"}
ODD = {"data.train": "{odd}"}
COARSE = {"views.global_size": "4", "views.num_local": "0"}  # smaller than half of any crop
ALL_VOTE = {"knn.k": "15", "knn.temperature": "1"}  # so the larger class always wins

EFFECTS = [
    Effect("out", "{root}/elsewhere", files),
    Effect("seed", "1", order),
    Effect("seed", "1", views),
    Effect("seed", "1", split),
    Effect("init_from", "{weights}", learned),
    Effect("allow_partial", "[norm.weight]", beginning, {"init_from": "{partial}"}),
    Effect("resume", "auto", second_start),
    Effect("overwrite", "true", second_start),
    Effect("expect_world_size", "2", beginning),
    Effect("terms", "{{dino: 2}}", learned, SGD),
    Effect("data.train", "{other}", split),
    Effect("data.val", "{other}", split),
    Effect("data.holdout", "0.5", split),
    Effect("data.root", "{other}", beginning, {"data.train": "torchvision:FashionMNIST"}),
    Effect("data.cache", "{root}/cache", scanned),
    Effect("data.mode", "gray", views),
    Effect("data.in_chans", "1", structure, {"data.mode": "unchanged", "data.in_chans": "3"}),
    Effect("data.mean", "[0.1, 0.2, 0.3]", learned),
    Effect("data.mean", "[0.1, 0.2, 0.3]", judged_images),
    Effect("data.std", "[0.1, 0.2, 0.3]", learned),
    Effect("data.std", "[0.1, 0.2, 0.3]", judged_images),
    Effect("data.orientation", "false", views, ODD),
    Effect("data.background", "[0, 255, 0]", views, ODD),
    Effect("data.window", "[0, 1000]", views, ODD),
    Effect("data.scaled_decode", "false", views, {**ODD, **COARSE}),
    Effect("data.max_pixels", "399", beginning),
    Effect("data.min_size", "20", split, ODD),
    Effect("data.on_error", "raise", beginning, ODD),
    Effect("data.max_bad_share", "0", beginning, ODD),
    Effect("data.epoch_images", "10", order),
    Effect("data.shuffle_shards", "1", order, {"data.train": "{shards}/*.tar"}),
    Effect("data.num_workers", "1", loader_processes),
    Effect("data.start_method", "spawn", loader_processes, FORKED),
    Effect("backbone.name", "xcit_nano_12_p8", structure),
    Effect("backbone.drop_path", "0.5", learned),
    Effect("backbone.options", "{{embed_dim: 16, depth: 2, num_heads: 2}}", structure),
    Effect("backbone.freeze_epochs", "1", learned),
    Effect("views.global_size", "[16, 20]", views),
    Effect("views.global_scale", "[0.9, 1]", views),
    Effect("views.num_local", "3", views),
    Effect("views.local_size", "[8, 12]", views),
    Effect("views.local_scale", "[0.3, 0.4]", views),
    Effect("views.ratio", "[1, 1]", views),
    Effect("views.flip", "0", views),
    Effect("views.jitter", "0", views),
    Effect("views.brightness", "0", views),
    Effect("views.contrast", "0", views),
    Effect("views.saturation", "0", views),
    Effect("views.hue", "0", views),
    Effect("views.grayscale", "0", views),
    Effect("views.global_blur", "[0, 0.1]", views),
    Effect("views.local_blur", "0", views),
    Effect("views.blur_sigma", "[1.9, 2]", views),
    Effect("views.global_solarize", "[1, 0.2]", views),
    Effect("views.solarize_threshold", "64", views, SOLARIZED),
    Effect("views.color_on", "device", views),
    Effect("head.num_prototypes", "32", structure),
    Effect("head.hidden_dim", "24", structure),
    Effect("head.bottleneck_dim", "12", structure),
    Effect("head.num_layers", "2", structure),
    Effect("head.batch_norm", "true", structure),
    Effect("head.norm_last_layer", "false", structure),
    Effect("head.freeze_epochs", "2", learned),
    Effect("head.temperature", "0.2", learned),
    Effect("teacher.momentum", "0.5", learned),
    Effect("teacher.momentum_end", "0.9", learned),
    Effect("teacher.temperature_start", "0.02", learned),
    Effect("teacher.temperature", "0.2", learned),
    Effect("teacher.temperature_warmup_epochs", "1", learned),
    Effect("teacher.center_momentum", "0.5", learned),
    Effect("optim.name", "sgd", learned),
    Effect("optim.lr", "2e-2", learned),
    Effect("optim.lr_scaling", "none", learned),
    Effect("optim.lr_end", "1e-3", learned),
    Effect("optim.warmup_epochs", "2", learned),
    Effect("optim.weight_decay", "0.9", learned),
    Effect("optim.weight_decay_end", "0.9", learned),
    Effect("optim.betas", "[0.5, 0.999]", learned),
    Effect("optim.betas", "[0.9, 0.9]", learned),
    Effect("optim.momentum", "0.5", learned, SGD),
    Effect("optim.clip_mode", "global_norm", learned, CLIPPED),
    Effect("optim.clip_mode", "none", learned, CLIPPED),
    Effect("optim.clip", "2e-3", learned, CLIPPED),
    Effect("train.epochs", "3", order),
    Effect("train.epochs", "3", learned),
    Effect("train.batch_size", "4", order),
    Effect("train.accumulation", "2", order),
    Effect("train.accumulation", "2", learned),
    Effect("train.activation_checkpointing", "true", checkpointed),
    Effect("train.compile", "blocks", compiled),
    Effect("train.sharding", "full", warned),
    Effect("train.precision", "bf16", learned),
    Effect("train.checkpoint_every", "2", files),
    Effect("train.keep_last", "1", files),
    Effect("train.keep_every", "1", files, {"train.keep_last": "1"}),
    Effect("train.max_hours", "0", beginning),
    Effect("train.on_nan", "skip", beginning, DIVERGING),
    Effect("train.on_full_disk", "wait", full_disk),
    Effect("knn.every", "1", logged),
    Effect("knn.k", "[3, 1]", accuracies),
    Effect("knn.temperature", "1e-3", accuracies, ALL_VOTE),
    Effect("knn.pooling", "[mean_patch]", accuracies),
    Effect("knn.size", "12", judged_images),
    Effect("knn.crop_ratio", "0.5", judged_images),
    Effect("knn.batch_size", "4", judged_images),
    Effect("knn.max_train", "8", judged_images),
    Effect("knn.max_val", "2", judged_images),
    Effect("knn.backend", "torch", operations),
    Effect("knn.unlabelled", "true", logged, {"knn.every": "2"}),
    Effect("log.every", "2", logged),
    Effect("log.progress", "plain", console),
    Effect("log.trackers", "[tensorboard]", files),
]
# A spawned process imports torch, a full disk is waited for, tensorboard takes a second.
SLOW = {"data.start_method", "train.on_full_disk", "log.trackers"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two folders of images, four times as many of one class as of the other, and two files of weights."""
    root = tmp_path_factory.mktemp("folders")
    made = {name: root / name for name in ("images", "other")}
    for seed, folder in enumerate(made.values()):
        write_image_folder(folder, classes=2, per_class=4, size=20, seed=seed)
        write_image_folder(folder, classes=1, per_class=16, size=20, seed=seed)
    torch.manual_seed(1)
    state = backbones.create(BASE["backbone.name"], **TINY).state_dict()
    made["odd"], made["shards"] = write_odd_folder(root / "odd"), write_shards(root / "shards")
    made["weights"], made["partial"] = root / "weights.pth", root / "partial.pth"
    torch.save(state, made["weights"])
    torch.save({key: value for key, value in state.items() if key != "norm.weight"}, made["partial"])
    return made


def write_odd_folder(root: Path) -> Path:
    """20 plain images, and one each of a turned, a transparent, a deep, a small and an unreadable one."""
    write_image_folder(root, classes=1, per_class=20, size=20)
    ramp = np.arange(0, 2000, 5, dtype=np.uint16).reshape(20, 20)
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(texture(1, 24, np.random.default_rng(0))[:20]).save(root / "turned.jpg", exif=turned)
    Image.new("RGBA", (20, 20), (255, 0, 0, 128)).save(root / "transparent.png")
    Image.fromarray(ramp).save(root / "deep.png")
    Image.new("RGB", (12, 12)).save(root / "small.png")
    (root / "unreadable.png").write_bytes(b"no image")
    return root


def write_shards(root: Path) -> Path:
    """Four shards of five images."""
    write_image_folder(root, classes=4, per_class=5, size=20)
    for folder in sorted(root.iterdir()):
        with tarfile.open(root / f"{folder.name}.tar", "w") as shard:
            for image in sorted(folder.iterdir()):
                shard.add(image, f"{folder.name}_{image.name}")
    return root


@pytest.fixture
def observe(tmp_path: Path, folders: dict[str, Path]) -> Callable[[Observer, Mapping[str, str]], object]:
    """What an observer sees of the base config with some settings changed, in a fresh folder."""

    def seen(observer: Observer, settings: Mapping[str, str]) -> object:
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        root.mkdir()
        texts = {key: text.format(root=root, **folders) for key, text in {**BASE, **settings}.items()}
        config = read(Config, [f"{key}={text}" for key, text in texts.items()], program="test")
        validate(config)
        return observer(config)

    return seen


@pytest.fixture(scope="module")
def remembered() -> dict[tuple[Observer, tuple[tuple[str, str], ...]], object]:
    """What was seen before a key was changed, which many keys share."""
    return {}


def test_every_leaf_of_the_config_has_an_effect_to_show():
    assert list(dict.fromkeys(effect.key for effect in EFFECTS)) == list(keys_of(Config))


@pytest.mark.parametrize("observer", dict.fromkeys(effect.observer for effect in EFFECTS))
def test_what_is_observed_repeats(observer, observe, remembered):
    remembered[observer, ()] = observe(observer, {})
    assert observe(observer, {}) == remembered[observer, ()]


@pytest.mark.parametrize(
    "effect",
    [pytest.param(effect, marks=[pytest.mark.slow] if effect.key in SLOW else []) for effect in EFFECTS],
    ids=lambda effect: f"{effect.key}-{effect.observer.__name__}",
)
def test_changing_a_key_shows(effect, observe, remembered):
    before = effect.observer, tuple(effect.given.items())
    if before not in remembered:
        remembered[before] = observe(effect.observer, effect.given)
    assert observe(effect.observer, {**effect.given, effect.key: effect.value}) != remembered[before]
