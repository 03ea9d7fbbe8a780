from pathlib import Path

import pytest

from nestling.ssl.command_line import read
from nestling.ssl.config import Config
from nestling.ssl.data.photo_tiles import TILE
from nestling.ssl.errors import UserError
from nestling.ssl.validation import validate

CONFIGS = Path(__file__).parents[2] / "recipes" / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
PUBLISHED = [name for name in NAMES if name.startswith("dino_xcit_")]


def config_of(name, *arguments):
    return read(Config, ["--config", name, *arguments], program="recipe.py", configs=CONFIGS)


@pytest.mark.parametrize("name", NAMES)
def test_every_config_is_legal_and_says_how_to_run_it(name):
    config = config_of(name, *(["data.train=/images"] if name in PUBLISHED else []))
    validate(config)
    assert config.out == f"runs/{name}"
    text = (CONFIGS / f"{name}.yaml").read_text()
    assert text.startswith("# ")
    assert "recipes/dino_xcit.py" in text
    assert "score" in text


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_wants_the_images_named(name):
    with pytest.raises(UserError, match=r"data\.train is missing; add data\.train="):
        config_of(name)


@pytest.mark.parametrize(
    ("name", "peak", "drop_path", "processes"),
    [
        ("dino_xcit_small_12_p16", 2e-3, 0.05, 16),
        ("dino_xcit_medium_24_p16", 1e-3, 0.15, 32),
        ("dino_xcit_medium_24_p8", 1e-3, 0.15, 128),
    ],
)
def test_the_published_configs_hold_the_published_numbers(name, peak, drop_path, processes):
    config = config_of(name, "data.train=/imagenet")
    batch = config.train.batch_size * processes
    assert batch == 1024
    assert config.optim.lr_scaling == "linear"
    assert config.optim.lr * batch / 256 == pytest.approx(peak)
    assert (config.optim.lr_end, config.optim.warmup_epochs, config.train.epochs) == (1e-5, 10, 300)
    assert (config.optim.name, config.optim.clip_mode) == ("adamw", "none")
    assert (config.optim.weight_decay, config.optim.weight_decay_end) == (0.04, 0.4)
    assert config.backbone.name == name.removeprefix("dino_")
    assert config.backbone.drop_path == drop_path
    views, teacher, head = config.views, config.teacher, config.head
    assert (views.global_size, views.global_scale) == ([224], [0.3, 1.0])
    assert (views.num_local, views.local_size, views.local_scale) == (8, [96], [0.05, 0.3])
    assert (views.global_blur, views.local_blur, views.global_solarize) == ([1.0, 0.1], 0.5, [0.0, 0.2])
    assert (teacher.temperature_start, teacher.temperature, teacher.temperature_warmup_epochs) == (
        0.04,
        0.07,
        30,
    )
    assert (teacher.momentum, teacher.momentum_end, teacher.center_momentum) == (0.996, 1.0, 0.9)
    assert (head.num_prototypes, head.norm_last_layer, head.freeze_epochs) == (65536, False, 1)
    assert config.terms == {"dino": 1}


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
