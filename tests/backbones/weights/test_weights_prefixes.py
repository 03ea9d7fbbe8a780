"""Networks nested in dictionaries and behind prefixes: the asked one is found, and only leading names go."""

import pytest
import torch

from nestling.backbones.weights.prefixes import open_container


def tensors(value=1.0, prefix=""):
    return {f"{prefix}norm.weight": torch.full((2,), value), f"{prefix}blocks.0.weight": torch.zeros(2, 2)}


def bare(content, network="teacher"):
    return open_container(content, network, "file.pth")


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "module.",
        "backbone.",
        "_orig_mod.",
        "model.",
        "module.backbone.",
        "backbone.module.",
        "_orig_mod.module.backbone.",
        "module._orig_mod.model.backbone._orig_mod.",
        "teacher.backbone.",
        "model.teacher.module.",
        "teacher_backbone.",
        "target_backbone.",
    ],
)
def test_leading_prefixes_go_in_any_order_and_nesting(prefix):
    assert bare(tensors(prefix=prefix)).tensors.keys() == tensors().keys()


@pytest.mark.parametrize(
    "key",
    [
        "encoder.backbone.layer.module.weight",
        "blocks.0.module.weight",
        "stem.model.backbone.bias",
        "embeddings.teacher.weight",
        "layer._orig_mod.weight",
    ],
)
def test_inner_names_stay(key):
    for prefix in ("", "module.", "module._orig_mod."):
        assert list(bare({prefix + key: torch.zeros(1)}).tensors) == [key]


def test_a_key_that_is_only_a_prefixs_name_stays():
    assert list(bare({"module": torch.zeros(1), "model": torch.ones(1)}).tensors) == ["module", "model"]


@pytest.mark.parametrize("network", ["teacher", "student"])
@pytest.mark.parametrize(
    "wrap", [lambda x: x, lambda x: {"state_dict": x}, lambda x: {"model": {"module": x}}]
)
def test_of_a_file_with_both_networks_the_asked_one_is_opened(network, wrap):
    values = {"student": 1.0, "teacher": 2.0}
    nested = {name: tensors(value, "module.backbone.") for name, value in values.items()}
    flat = {
        key: x for name, value in values.items() for key, x in tensors(value, f"{name}.backbone.").items()
    }
    for content in ({**nested, "epoch": 3, "optimizer": {"state": {}}}, flat):
        found = bare(wrap(content), network)
        assert found.network == network
        assert found.tensors["norm.weight"][0] == values[network]


def test_a_networks_own_container_is_opened():
    found = bare({"teacher": {"backbone": tensors(), "head": tensors(2.0)}})
    assert found.tensors["norm.weight"][0] == 1.0
    assert found.network == "teacher"


def test_the_average_of_the_weights_stands_for_the_teacher():
    content = {"model": tensors(1.0), "model_ema": tensors(2.0)}
    teacher, student = bare(content), bare(content, "student")
    assert (teacher.network, teacher.tensors["norm.weight"][0]) == ("teacher", 2.0)
    assert (student.network, student.tensors["norm.weight"][0]) == (None, 1.0)


@pytest.mark.parametrize("content", [{"student": tensors()}, tensors(prefix="student.backbone.")])
def test_a_file_of_the_other_network_is_refused(content):
    with pytest.raises(ValueError, match=r"file\.pth holds the student and no teacher.*network='student'"):
        bare(content)
    assert bare(content, "student").network == "student"


def test_a_file_of_one_network_is_either():
    assert bare({"model": tensors()}).network is bare({"model": tensors()}, "student").network is None


def test_what_lies_beside_the_backbone_is_a_head():
    content = tensors(prefix="module.backbone.") | {"module.head.norm.weight": torch.zeros(1)}
    found = bare(content | {"module.norm.weight": torch.zeros(1)})
    assert found.tensors.keys() == tensors().keys()
    assert found.heads == ("head.norm.weight", "norm.weight")


def test_an_encoder_is_opened_only_where_it_holds_the_patch_embedding():
    masked = tensors(prefix="encoder.") | {"encoder.patch_embed.proj.weight": torch.zeros(1)}
    found = bare(masked | {"decoder.0.weight": torch.zeros(1)})
    assert set(found.tensors) == {*tensors(), "patch_embed.proj.weight"}
    assert found.heads == ("decoder.0.weight",)
    assert set(bare(tensors(prefix="encoder.")).tensors) == set(tensors(prefix="encoder."))


def test_two_tensors_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"two tensors named norm\.weight"):
        bare(tensors() | tensors(prefix="module."))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"epoch": 3, "args": None}, r"no tensors.*epoch, args"),
        ({}, "no tensors.*nothing"),
        ({"model": {"a": 1}}, "no tensors.*its keys are a"),
        ([torch.zeros(1)], r"instead of a dictionary.*state_dict"),
        (torch.zeros(1), r"instead of a dictionary.*state_dict"),
    ],
)
def test_a_file_without_tensors_by_name_is_refused(content, message):
    with pytest.raises(ValueError, match=rf"(?s)file\.pth.*{message}"):
        bare(content)
