from pathlib import Path

import pytest

from nestling.ssl.command_line import read
from nestling.ssl.config import Config
from nestling.ssl.data.sources.photo_tiles import TILE
from nestling.ssl.errors import UserError
from nestling.ssl.validation import validate

CONFIGS = Path(__file__).parents[2] / "recipes" / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml") if path.stem.startswith(("dino_", "photo_")))
PUBLISHED = [name for name in NAMES if name.startswith("dino_")]


def recipe_of(name):
    """The script that a config is written for."""
    return "recipes/dino_xcit.py" if name == "photo_tiles" else f"recipes/dino_{name.split('_')[1]}.py"


def config_of(name, *arguments):
    return read(Config, ["--config", name, *arguments], program="recipe.py", configs=CONFIGS)


@pytest.mark.parametrize("name", NAMES)
def test_every_config_is_legal_and_says_how_to_run_it(name):
    config = config_of(name, *(["data.train=/images"] if name in PUBLISHED else []))
    validate(config)
    assert config.out == f"runs/{name}"
    text = (CONFIGS / f"{name}.yaml").read_text()
    assert text.startswith("# ")
    assert f"accelerate launch {recipe_of(name)}" in text
    assert "score" in text


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_wants_the_images_named(name):
    with pytest.raises(UserError, match=r"data\.train is missing; add data\.train="):
        config_of(name)


def check_what_all_share(config, name):
    """The settings of DINO's own defaults that no published run changes."""
    assert config.terms == {"dino": 1}
    assert name.startswith(f"dino_{config.backbone.name}")
    assert (config.optim.name, config.optim.lr_scaling, config.optim.warmup_epochs) == ("adamw", "linear", 10)
    assert (config.optim.weight_decay, config.optim.weight_decay_end) == (0.04, 0.4)
    views, teacher, head = config.views, config.teacher, config.head
    assert (views.global_size, views.num_local, views.local_size) == ([224], 8, [96])
    assert (views.global_blur, views.local_blur, views.global_solarize) == ([1.0, 0.1], 0.5, [0.0, 0.2])
    assert (teacher.momentum, teacher.momentum_end, teacher.center_momentum) == (0.996, 1.0, 0.9)
    assert (teacher.temperature_start, head.temperature) == (0.04, 0.1)
    assert (head.num_prototypes, head.hidden_dim, head.bottleneck_dim, head.freeze_epochs) == (
        65536,
        2048,
        256,
        1,
    )


@pytest.mark.parametrize(
    ("name", "peak", "drop_path", "processes"),
    [
        ("dino_xcit_small_12_p16", 2e-3, 0.05, 16),
        ("dino_xcit_medium_24_p16", 1e-3, 0.15, 32),
        ("dino_xcit_medium_24_p8", 1e-3, 0.15, 128),
    ],
)
def test_the_published_xcit_configs_hold_the_published_numbers(name, peak, drop_path, processes):
    config = config_of(name, "data.train=/imagenet")
    check_what_all_share(config, name)
    batch = config.train.batch_size * processes
    assert batch == 1024
    assert config.optim.lr * batch / 256 == pytest.approx(peak)
    assert (config.optim.lr_end, config.train.epochs, config.optim.clip_mode) == (1e-5, 300, "none")
    assert config.backbone.drop_path == drop_path
    assert (config.views.global_scale, config.views.local_scale) == ([0.3, 1.0], [0.05, 0.3])
    assert (config.teacher.temperature, config.teacher.temperature_warmup_epochs) == (0.07, 30)
    assert config.head.norm_last_layer is False


@pytest.mark.parametrize(
    ("name", "epochs", "processes", "batch", "temperature", "warmup", "unit_norm"),
    [
        ("dino_vit_small_p16", 100, 8, 512, 0.04, 0, True),
        ("dino_vit_small_p16_boosted", 300, 16, 1024, 0.07, 30, False),
        ("dino_swin_tiny_w7", 300, 16, 512, 0.07, 30, False),
    ],
)
def test_the_published_vit_and_swin_configs_hold_the_published_numbers(
    name, epochs, processes, batch, temperature, warmup, unit_norm
):
    config = config_of(name, "data.train=/imagenet")
    check_what_all_share(config, name)
    assert config.train.batch_size * processes == batch
    assert (config.train.epochs, config.optim.lr, config.optim.lr_end) == (epochs, 5e-4, 1e-6)
    assert (config.optim.clip_mode, config.optim.clip) == ("per_parameter", 3.0)
    assert config.backbone.drop_path == 0.1
    assert (config.views.global_scale, config.views.local_scale) == ([0.4, 1.0], [0.05, 0.4])
    assert (config.teacher.temperature, config.teacher.temperature_warmup_epochs) == (temperature, warmup)
    assert config.head.norm_last_layer is unit_norm


@pytest.mark.parametrize("name", ["dino_xcit_medium_24_p16", "dino_xcit_medium_24_p8"])
def test_the_deep_variants_start_with_a_small_layer_scale(name):
    from nestling import backbones

    backbone = backbones.create(config_of(name, "data.train=/x").backbone.name, depth=1, cls_depth=1)
    scales = [value for key, value in backbone.named_parameters() if "gamma" in key]
    assert scales
    assert all((scale == 1e-5).all() for scale in scales)


def test_the_demo_learns_from_crops_no_larger_than_the_embedded_tiles_and_judges_whole_tiles():
    config = config_of("photo_tiles")
    assert config.data.train == "photo-tiles"
    assert max(config.views.global_size + config.views.local_size) <= TILE
    assert config.knn.size == TILE == 32
    assert config.knn.crop_ratio == 1.0
