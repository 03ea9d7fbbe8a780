"""`init_from`: what a new run starts from, and what it refuses before it touches anything."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nestling import backbones
from nestling.ssl import config as schema
from nestling.ssl.config import Config
from nestling.ssl.distillation import SelfDistillation
from nestling.ssl.errors import UserError
from nestling.ssl.initial_weights import settled, start_from

TINY = {
    "xcit_nano_12_p4": {"embed_dim": 16, "depth": 1, "num_heads": 2, "tokens_norm": True},
    "vit_tiny_p8": {"embed_dim": 64, "depth": 1, "num_heads": 1, "position_size": 32},
    "swin_tiny_w7": {"embed_dim": 32, "depth": 2, "num_heads": 1},
}


def config_of(name: str, init_from: Path, options: dict | None = None, **changes) -> Config:
    head = schema.Head(num_prototypes=16, hidden_dim=16, bottleneck_dim=8)
    return replace(
        Config(init_from=str(init_from), head=head, backbone=schema.Backbone(name, 0.0, options or {})),
        **changes,
    )


def saved(tmp_path: Path, name: str, **options) -> tuple[Path, dict[str, Tensor]]:
    """A DINO-like file of a network that was never seen here: teacher, prefixes and all."""
    torch.manual_seed(9)
    state = backbones.create(name, **{**TINY[name], **options}).state_dict()
    path = tmp_path / "weights.pth"
    torch.save({"teacher": {f"module.backbone.{key}": value for key, value in state.items()}}, path)
    return path, state


def started(config: Config) -> SelfDistillation:
    config, weights = settled(config)
    assert weights is not None
    method = SelfDistillation(config)
    start_from(method, weights, config)
    return method


@pytest.mark.parametrize("name", TINY)
def test_student_and_teacher_start_from_the_weights_in_every_family(name, tmp_path):
    path, state = saved(tmp_path, name)
    method = started(config_of(name, path, {**TINY[name]}))
    for network in (method.student, method.teacher):
        for key, value in network.backbone.state_dict().items():
            assert torch.equal(value, state[key]), key


def test_options_that_the_weights_were_trained_with_need_not_be_spelled(tmp_path):
    path, state = saved(tmp_path, "vit_tiny_p8", registers=2, layer_scale=0.1)
    config = config_of("vit_tiny_p8", path, {"position_size": 32})
    options = settled(config)[0].backbone.options
    assert (options["registers"], options["depth"], options["embed_dim"]) == (2, 1, 64)
    assert torch.equal(
        started(config).student.backbone.state_dict()["register_tokens"], state["register_tokens"]
    )


def test_what_the_config_says_wins_over_what_the_file_says(tmp_path):
    path, _ = saved(tmp_path, "vit_tiny_p8")
    config = config_of("vit_tiny_p8", path, {"interpolate_antialias": True, "interpolate_offset": 0.0})
    options = settled(config)[0].backbone.options
    assert (options["interpolate_antialias"], options["interpolate_offset"]) == (True, 0.0)


def test_the_position_table_is_resized_to_the_one_of_the_config(tmp_path):
    path, state = saved(tmp_path, "vit_tiny_p8")
    table = started(config_of("vit_tiny_p8", path, {"position_size": 64})).student.backbone.state_dict()[
        "pos_embed"
    ]
    assert table.shape == (1, 1 + 64, 64)
    assert torch.equal(table[:, 0], state["pos_embed"][:, 0])


@pytest.mark.parametrize("name", TINY)
def test_weights_for_other_channels_are_adapted_to_the_images(name, tmp_path):
    path, state = saved(tmp_path, name, in_chans=1)
    backbone = started(config_of(name, path, {**TINY[name]})).student.backbone.eval()
    gray = torch.rand(2, 1, 32, 32)
    torch.manual_seed(9)
    single = backbones.create(name, **TINY[name], in_chans=1).eval()
    assert torch.equal(single.state_dict()[next(iter(state))], state[next(iter(state))])
    found, expected = backbone(gray.expand(-1, 3, -1, -1)).cls, single(gray).cls
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_mask_token_of_the_file_is_left_out_where_no_term_masks(tmp_path):
    path, _ = saved(tmp_path, "vit_tiny_p8", mask_token=True)
    assert "mask_token" not in started(config_of("vit_tiny_p8", path)).student.backbone.state_dict()


def test_keys_that_may_be_missing_are_named(tmp_path):
    path, state = saved(tmp_path, "vit_tiny_p8")
    config = config_of("vit_tiny_p8", path, {"position_size": 32, "registers": 3})
    with pytest.raises(UserError, match=r"init_from=.*missing are register_tokens.*allow_partial"):
        started(config)
    backbone = started(replace(config, allow_partial=["register_tokens"])).student.backbone
    assert torch.equal(backbone.state_dict()["pos_embed"], state["pos_embed"])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vit_tiny_p8", r"holds xcit_\w+_p4, but backbone.name=vit_tiny_p8; set backbone.name=xcit_"),
        ("xcit_nano_12_p8", r"init_from=.*do not fit xcit_nano_12_p8|set backbone.name=xcit_"),
    ],
)
def test_another_network_is_refused_with_the_name_to_set(name, expected, tmp_path):
    path, _ = saved(tmp_path, "xcit_nano_12_p4")
    with pytest.raises(UserError, match=expected):
        started(
            config_of(name, path, {"embed_dim": 16, "depth": 1, "num_heads": 2} if "xcit" in name else {})
        )


@pytest.mark.parametrize("content", [None, b"", b"not weights"])
def test_a_file_that_holds_no_weights_is_refused_by_key_and_name(content, tmp_path):
    path = tmp_path / "weights.pth"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"init_from=.*weights\.pth"):
        settled(config_of("vit_tiny_p8", path))
