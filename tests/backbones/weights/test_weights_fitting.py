"""Fitting tensors into a backbone: all of them or an error, two adaptations, and a report."""

import pytest
import torch
import torch.nn.functional as F

from nestling import backbones
from nestling.backbones.weights import Report, fit

VIT = {"depth": 2, "embed_dim": 64, "num_heads": 1, "position_size": 64}


def vit(**options):
    torch.manual_seed(options.pop("seed", 0))
    return backbones.create("vit_tiny_p16", **{**VIT, **options})


def test_all_tensors_are_copied_and_reported():
    source, target = vit(), vit(seed=1)
    report = fit(target, source.state_dict())
    assert report.matched == tuple(source.state_dict())
    assert (report.missing, report.unexpected, report.misshapen, report.notes) == ((), (), {}, ())
    for key, value in target.state_dict().items():
        assert torch.equal(value, source.state_dict()[key]), key


def test_nothing_is_loaded_where_something_is_missing():
    source, target = vit().state_dict(), vit(seed=1)
    before = {key: value.clone() for key, value in target.state_dict().items()}
    del source["blocks.1.norm1.weight"]
    with pytest.raises(ValueError, match=r"missing are blocks\.1\.norm1\.weight") as caught:
        fit(target, source)
    assert "29 of 30" in str(caught.value)
    for key, value in target.state_dict().items():
        assert torch.equal(value, before[key])


def test_a_total_miss_is_refused():
    with pytest.raises(ValueError, match="0 of 30 tensors match"):
        fit(vit(), {"teacher": torch.zeros(1)})


def test_a_misshapen_tensor_is_refused_with_both_shapes():
    wide = vit(mlp_ratio=2.0).state_dict()
    with pytest.raises(ValueError, match=r"fc1\.weight is \(128, 64\) in the file and \(256, 64\)"):
        fit(vit(), wide)


def test_a_tensor_inside_the_network_that_the_backbone_lacks_is_refused():
    inner = ("blocks.0.attn.q_norm.weight", "norm_pre.weight", "blocks.2.norm1.weight", "dist_token")
    for key in (*inner, "register_tokens", "absolute_pos_embed"):
        with pytest.raises(ValueError, match=f"the backbone has no {key}"):
            fit(vit(), vit().state_dict() | {key: torch.zeros(64)})


def test_heads_are_left_out_and_listed():
    heads = {"head.weight": torch.zeros(2, 64), "decoder.0.bias": torch.zeros(1)}
    report = fit(vit(), vit().state_dict() | heads)
    assert report.unexpected == tuple(heads)


def test_what_may_differ_is_named_by_patterns():
    source, target = vit(seed=1).state_dict(), vit()
    kept = target.get_parameter("blocks.1.norm1.weight").clone().fill_(7.0)
    target.get_parameter("blocks.1.norm1.weight").data.copy_(kept)
    del source["blocks.1.norm1.weight"]
    source["blocks.1.mlp.fc1.bias"] = torch.zeros(3)
    source["blocks.0.attn.q_norm.weight"] = torch.zeros(3)
    report = fit(target, source, ["blocks.1.*", "*.q_norm.*"])
    assert report.missing == ("blocks.1.norm1.weight",)
    assert report.misshapen == {"blocks.1.mlp.fc1.bias": ((3,), (256,))}
    assert torch.equal(target.get_parameter("blocks.1.norm1.weight"), kept)
    assert torch.equal(target.get_parameter("norm.weight"), source["norm.weight"])
    with pytest.raises(ValueError, match=r"blocks\.1\.norm1\.weight"):
        fit(target, source, ["blocks.1.mlp.*", "*.q_norm.*"])


def test_a_pattern_without_a_key_is_refused():
    with pytest.raises(ValueError, match=r"allow_partial='block\.1\.\*' matches no key of vit_tiny_p16"):
        fit(vit(), vit().state_dict(), ["block.1.*"])


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_p16", VIT),
        ("xcit_nano_12_p16", {"depth": 1}),
        ("xcit_nano_12_p16", {"depth": 1, "stem": "linear"}),
        ("swin_tiny_w7", {"embed_dim": 24, "depth": 2}),
    ],
)
def test_one_channel_answers_a_gray_image_as_three_equal_channels_did(name, options):
    color = backbones.create(name, **options).double().eval()
    gray = backbones.create(name, in_chans=1, **options).double().eval()
    report = fit(gray, color.state_dict())
    images = torch.randn(1, 1, 64, 64).double()
    difference = gray(images).patches - color(images.expand(-1, 3, -1, -1)).patches
    assert difference.abs().max() < 1e-9
    (note,) = report.notes
    assert "from 3 to 1 input channels" in note


@torch.no_grad()
@pytest.mark.parametrize("in_chans", [2, 4, 5, 6])
def test_more_channels_repeat_the_old_ones_at_the_old_scale(in_chans):
    color, wide = vit(), vit(in_chans=in_chans)
    fit(wide, color.state_dict())
    old, new = color.patch_embed.proj.weight, wide.patch_embed.proj.weight
    for channel in range(in_chans):
        torch.testing.assert_close(new[:, channel], old[:, channel % 3] * 3 / in_chans)
    if in_chans == 6:
        images = torch.randn(2, 3, 64, 64)
        torch.testing.assert_close(
            wide(images.repeat(1, 2, 1, 1)).patches, color(images).patches, atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("size", [32, 96, 224])
def test_a_position_table_is_resized_and_the_class_kept(size):
    source, target = vit(), vit(position_size=size)
    report = fit(target, source.state_dict())
    old, new = source.pos_embed, target.pos_embed
    assert torch.equal(new[:, :1], old[:, :1])
    image = old[:, 1:].unflatten(1, (4, 4)).permute(0, 3, 1, 2)
    side = size // 16
    expected = F.interpolate(image, size=(side, side), mode="bicubic").flatten(2).mT
    torch.testing.assert_close(new[:, 1:], expected)
    assert report.notes == (f"adapted: pos_embed from 4 x 4 to {side} x {side} patches",)


@torch.no_grad()
@pytest.mark.parametrize("size", [48, 96, 208])
@pytest.mark.parametrize("rule", [(0.0, False), (0.1, False), (0.0, True), (0.1, True)])
def test_the_fitted_network_is_the_source_at_the_new_size(rule, size):
    options = {"interpolate_offset": rule[0], "interpolate_antialias": rule[1]}
    source = vit(position_size=128, **options).double().eval()
    source.pos_embed.copy_(torch.randn(source.pos_embed.shape))
    target = vit(position_size=size, seed=1, **options).double().eval()
    fit(target, source.state_dict())
    images = torch.randn(1, 3, size, size).double()
    features, expected = target(images), source(images)
    assert (features.cls - expected.cls).abs().max() < 1e-9
    assert (features.patches - expected.patches).abs().max() < 1e-9


@torch.no_grad()
def test_a_fitted_swin_is_the_source_at_the_new_size():
    options = {"embed_dim": 24, "depth": 2, "position": "both"}
    source = backbones.create("swin_tiny_w7", position_size=64, **options).double().eval()
    source.absolute_pos_embed.copy_(torch.randn(source.absolute_pos_embed.shape))
    target = backbones.create("swin_tiny_w7", position_size=96, **options).double().eval()
    fit(target, source.state_dict())
    images = torch.randn(1, 3, 96, 96).double()
    assert (target(images).patches - source(images).patches).abs().max() < 1e-9


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused_by_key(value):
    source = vit(seed=1).state_dict()
    source["blocks.1.mlp.fc1.bias"][3] = value
    target = vit()
    before = target.state_dict()["norm.weight"].clone()
    with pytest.raises(ValueError, match=r"blocks\.1\.mlp\.fc1\.bias holds nan or infinity"):
        fit(target, source)
    assert torch.equal(target.norm.weight, before)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_quantised_weights_and_whole_numbers_are_refused_by_key(dtype):
    source = vit().state_dict()
    source["blocks.0.mlp.fc1.weight"] = torch.ones(256, 64).to(dtype)
    with pytest.raises(ValueError, match=rf"blocks\.0\.mlp\.fc1\.weight holds {dtype}"):
        fit(vit(), source)


def test_counters_of_running_statistics_stay_integers():
    source, target = (backbones.create("xcit_nano_12_p16", depth=1) for _ in range(2))
    counters = [key for key in source.state_dict() if key.endswith("num_batches_tracked")]
    source.get_buffer(counters[0]).fill_(7)
    fit(target, source.state_dict())
    assert target.get_buffer(counters[0]) == 7


def test_swins_absolute_table_is_resized():
    options = {"embed_dim": 24, "depth": 2, "position": "both"}
    source = backbones.create("swin_tiny_w7", position_size=64, **options)
    target = backbones.create("swin_tiny_w7", position_size=32, **options)
    assert fit(target, source.state_dict()).notes == (
        "adapted: absolute_pos_embed from 16 x 16 to 8 x 8 patches",
    )


def test_without_adaptation_neither_is_touched():
    for options in ({"in_chans": 1}, {"position_size": 32}):
        with pytest.raises(ValueError, match="in the backbone"):
            fit(vit(**options), vit().state_dict(), adapt=False)


def test_the_given_tensors_are_not_changed():
    source = vit().state_dict()
    before = dict(source)
    fit(vit(in_chans=1, position_size=32), source)
    assert source.keys() == before.keys()
    assert all(source[key] is before[key] for key in before)


def test_half_precision_weights_become_the_backbones_type():
    target = vit()
    fit(target, vit(seed=1).half().state_dict())
    assert target.norm.weight.dtype == torch.float32


def test_a_report_reads_in_a_few_lines():
    keys = tuple(f"blocks.{number}.weight" for number in range(9))
    report = Report("timm ViT", "teacher", keys, ("norm.bias",), keys, {"a": ((1,), (2,))}, ("by the way",))
    assert str(report).splitlines() == [
        "9 tensors loaded from timm ViT, the teacher",
        "missing: norm.bias",
        "another shape: a is (1,) in the file and (2,) in the backbone",
        f"left out: {', '.join(keys[:6])} and 3 more",
        "by the way",
    ]
    assert str(Report("DINO", None, keys)) == "9 tensors loaded from DINO"
