import dataclasses
import re
from pathlib import Path

import pytest
import torch

from nestling.ssl.command_line import read
from nestling.ssl.config import Config
from nestling.ssl.errors import UserError
from nestling.ssl.keys import fault, keys_of
from nestling.ssl.manual import markdown
from nestling.ssl.pages import renewed
from nestling.ssl.validation import validate

TINY = ["backbone.options={embed_dim: 32, depth: 1, num_heads: 2}"]


def config_of(*arguments):
    return read(Config, [*TINY, *arguments], program="recipe.py")


def test_the_defaults_are_legal_one_by_one_and_together():
    for key in keys_of(Config).values():
        assert fault(key, key.default) is None, key.name
    validate(config_of())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("train.epochs=5", ["optim.warmup_epochs=10", "train.epochs=5"]),
        ("train.epochs=20 teacher.temperature_warmup_epochs=30",
         ["teacher.temperature_warmup_epochs=30", "train.epochs=20"]),
        ("head.freeze_epochs=100.5", ["head.freeze_epochs=100.5", "train.epochs=100"]),
        ("views.global_scale=[.1,.3] views.local_scale=[.05,.4]",
         ["views.local_scale=[0.05, 0.4]", "views.global_scale=[0.1, 0.3]"]),
        ("data.mean=[.5,.5]", ["data.mean=[0.5, 0.5] has 2 numbers", "3 channels", "data.mode=rgb"]),
        ("data.mean=.5 data.std=.5", ["data.mean=[0.5] has 1 numbers", "give 3"]),
        ("data.mode=gray data.std=[.5,.5,.5]", ["data.std=[0.5, 0.5, 0.5]", "1 channels", "data.mode=gray"]),
        ("backbone.options.in_chans=1", ["backbone.options.in_chans=1", "write data.in_chans"]),
        ("data.in_chans=5", ["data.in_chans=5", "data.mode=rgb", "data.mode=unchanged"]),
        ("data.mode=gray data.in_chans=3", ["data.in_chans=3", "data.mode=gray", "makes 1"]),
        ("data.mode=unchanged", ["data.mode=unchanged needs data.in_chans"]),
        ("data.mode=unchanged data.in_chans=5", ["data.mean is needed for 5 channels", "measure_data.py"]),
        ("data.window=[4,4]", ["data.window=[4, 4] is empty"]),
        ("terms.dinno=1", ["terms.dinno=1", "did you mean terms.dino?"]),
        ("terms={}", ["terms={}", "dino"]),
        ("terms.dino=0", ["terms={dino: 0}", "above 0"]),
        ("backbone.name=xcit_smal_12_p16", ["backbone.name=xcit_smal_12_p16", "xcit_small_12_p16"]),
        ("backbone.options.dept=3", ["backbone.options=", "dept", "depth"]),
        ("backbone.options.depth=many", ["backbone.options=", "depth", "many"]),
        ("backbone.options.num_heads=5", ["backbone.options=", "num_heads"]),
        ("backbone.options.drop_path=.1", ["backbone.options.drop_path=0.1", "write backbone.drop_path=0.1"]),
        ("backbone.options.name=x", ["backbone.options.name=x", "write backbone.name=x"]),
        ("views.local_size=[96,8]", ["views.local_size=8", "backbone.name=xcit_small_12_p16", "16"]),
        ("views.global_size=4", ["views.global_size=4", "16"]),
        ("knn.size=4", ["knn.size=4", "16"]),
        ("train.batch_size=auto train.sharding=full", ["train.batch_size=auto", "give a number"]),
        ("allow_partial=[norm.*]", ["allow_partial=[norm.*]", "does nothing without init_from"]),
        ("out=runs/a init_from=runs/a overwrite=true", ["overwrite=true would delete init_from=runs/a"]),
        ("out=runs/a init_from=runs/a/checkpoints/step_1 overwrite=true", ["overwrite=true would delete"]),
        ("out=runs/\udcff", [r"out=runs/\xff is no UTF-8", "choose another name"]),
        ("resume=auto overwrite=true", ["overwrite=true", "resume=auto"]),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_together_are_refused_by_name(arguments, expected):
    with pytest.raises(UserError) as caught:
        validate(config_of(*arguments.split(" ")))
    message = str(caught.value)
    assert "\n" not in message
    assert [part for part in expected if part not in message] == [], message


@pytest.mark.parametrize(
    "arguments",
    [
        "train.epochs=10 teacher.temperature_warmup_epochs=10 head.freeze_epochs=10",
        "views.num_local=0 views.local_size=1 views.local_scale=[.9,1] views.global_scale=[.1,.3]",
        "views.local_size=[224] views.global_size=[96]",
        "views.global_size=[97] views.local_size=[17]",
        "data.in_chans=3",
        "data.mode=gray",
        "data.mode=gray data.in_chans=1 data.mean=.5 data.std=.2",
        "data.mode=unchanged data.in_chans=1",
        "data.mode=unchanged data.in_chans=5 data.mean=[.1,.2,.3,.4,.5] data.std=[.1,.2,.3,.4,.5]",
        "data.window=[0,4095]",
        "terms.dino=.5",
    ],
)
def test_settings_at_the_edge_are_accepted(arguments):
    validate(config_of(*arguments.split(" ")))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["backbone.name=torchvision:resnet18"],
            r"torchvision:resnet18.*not 0\.05; set backbone\.drop_path=0",
        ),
        (["backbone.name=torch.nn:Identity", "backbone.drop_path=0"], r"torch\.nn:Identity"),
        (
            [
                "backbone.name=torchvision:vgg11",
                "backbone.drop_path=0",
                "train.activation_checkpointing=true",
            ],
            r"train\.activation_checkpointing=true: torchvision:vgg11",
        ),
    ],
)
def test_a_foreign_network_is_refused_with_the_key_to_set(arguments, expected):
    with pytest.raises(UserError, match=expected):
        validate(read(Config, arguments, program="recipe.py"))


def test_validation_draws_no_random_numbers():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    validate(config_of())
    assert torch.equal(torch.get_rng_state(), before)


def test_every_key_has_a_meaning_and_every_section_too():
    for key in keys_of(Config).values():
        assert re.fullmatch(r"\S.{1,99}", key.meaning), key.name
    for part in dataclasses.fields(Config):
        if dataclasses.is_dataclass(part.type):
            assert part.type.__doc__
            assert not part.type.__doc__.startswith(part.type.__name__ + "("), part.name


def test_the_page_on_configuration_shows_the_schema_as_it_is():
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    text = page.read_text(encoding="utf-8")
    assert text == renewed(text, "keys", markdown(Config)), f"run: python -m nestling.ssl.manual {page.name}"
    for name in keys_of(Config):
        assert text.count(f"| `{name}` |") == 1
