"""Every layout of a Swin: saved as users have it, loaded, and compared in float64 with its own library."""

import math

import pytest
import torch
from foreign_networks import images, largest, stirred

from nestling import backbones
from nestling.backbones.weights.swin import resize_table, widen_tables

SMALL = {"embed_dim": 24, "depth": 2}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def ours(name="swin_tiny_w7", **options):
    torch.manual_seed(0)
    return stirred(backbones.create(name, **{**SMALL, **options}))


def saved(path, content):
    torch.save(content, path)
    return path


def published(network, window=7):
    """Our state dict with the buffers and the head of Swin's published files."""
    state = dict(network.state_dict())
    for key in list(state):
        if key.endswith("relative_position_bias_table"):
            index = torch.zeros(window * window, window * window, dtype=torch.long)
            state[key.replace("bias_table", "index")] = index
    for stage in range(3):
        state[f"layers.{stage}.blocks.1.attn_mask"] = torch.zeros(4, window**2, window**2)
    return state


@pytest.mark.parametrize("size", [224, 96, 100])
def test_torchvision_at_any_size(size, tmp_path):
    """Its attended padding is chosen, so that sizes the window doesn't divide agree too."""
    torchvision = pytest.importorskip("torchvision")
    theirs = stirred(
        torchvision.models.SwinTransformer([4, 4], 24, [2, 2, 2, 2], [3, 6, 12, 24], [7, 7], num_classes=5)
    )
    backbone, report = backbones.load(saved(tmp_path / "swin.pth", theirs.state_dict()))
    theirs = theirs.double()
    expected = theirs.norm(theirs.features(images(size)))
    assert largest(backbone.double()(images(size)).patches - expected.flatten(1, 2)) < 1e-9
    assert report.layout == "torchvision Swin"
    assert backbone.layers[0].blocks[0].attn.masked is False
    assert {"head.weight", "head.bias"} < set(report.unexpected)
    assert len(report.unexpected) == 2 + 8  # and the index of each block


@pytest.mark.parametrize("window", [7, 14])
def test_timm(window, tmp_path):
    """With windows of 14 its last stage, a map of 7 x 7, holds tables for 7."""
    timm = pytest.importorskip("timm")
    theirs = timm.create_model(
        "swin_tiny_patch4_window7_224", embed_dim=24, depths=(2, 2, 4, 2), window_size=window, num_classes=3
    )
    theirs = stirred(theirs)
    backbone, report = backbones.load(saved(tmp_path / "swin.pth", theirs.state_dict()))
    assert report.layout == "timm Swin"
    assert ("bias tables" in str(report)) == (window == 14)
    expected = theirs.double().forward_features(images()).flatten(1, 2)
    assert largest(backbone.double()(images()).patches - expected) < 1e-9


@pytest.mark.parametrize("absolute", [False, True])
def test_hugging_face(absolute, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.SwinConfig(embed_dim=24, depths=[2, 2, 2, 2], use_absolute_embeddings=absolute)
    theirs = stirred(transformers.SwinForImageClassification(config))
    theirs.save_pretrained(tmp_path / "folder")
    for path in (tmp_path / "folder", saved(tmp_path / "memory.bin", theirs.state_dict())):
        backbone, report = backbones.load(path)
        assert report.layout == "Hugging Face Swin"
        expected = theirs.double().swin(images()).last_hidden_state
        assert largest(backbone.double()(images()).patches - expected) < 1e-9
        assert backbone.layers[0].blocks[0].attn.masked is False


@pytest.mark.parametrize("size", [96, 200])
def test_hugging_face_at_other_sizes(size, tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = stirred(transformers.SwinModel(transformers.SwinConfig(embed_dim=24, depths=[2, 2, 2, 2])))
    backbone, _ = backbones.load(saved(tmp_path / "swin.bin", theirs.state_dict()))
    if size == 200:  # a last map of 7 x 7: below the window transformers can't run
        expected = theirs.double()(images(size)).last_hidden_state
        assert largest(backbone.double()(images(size)).patches - expected) < 1e-9
    else:
        with pytest.raises(RuntimeError):
            theirs.double()(images(size))
        assert backbone.double()(images(size)).patches.isfinite().all()


def same(backbone, other, size=224):
    return largest(backbone.double()(images(size)).patches - other.double()(images(size)).patches) == 0


def test_the_published_files(tmp_path):
    network = ours()
    state = published(network) | {"head.weight": torch.zeros(3, 192), "head.bias": torch.zeros(3)}
    backbone, report = backbones.load(saved(tmp_path / "swin_tiny.pth", {"model": state}))
    assert report.layout == "Swin"
    assert {"head.weight", "layers.0.blocks.1.attn_mask"} < set(report.unexpected)
    assert backbone.layers[0].blocks[0].attn.masked is True
    assert same(backbone, network)
    assert same(backbone, network, 96)


@pytest.mark.parametrize("network", ["teacher", "student"])
def test_esvit(network, tmp_path):
    networks = {"student": ours(padding="attended"), "teacher": stirred(ours(padding="attended"), seed=5)}
    heads = {"head.mlp.0.weight": torch.zeros(2, 192), "head_dense.last_layer.weight_g": torch.ones(2, 1)}
    content = {
        name: {f"module.{key}": value for key, value in (published(each) | heads).items()}
        for name, each in networks.items()
    }
    backbone, report = backbones.load(saved(tmp_path / "checkpoint.pth", content), network=network)
    assert (report.layout, report.network) == ("EsViT", network)
    assert set(heads) < set(report.unexpected)
    assert same(backbone, networks[network], 96)


def test_esvits_window_of_14_holds_smaller_tables_in_its_last_stage(tmp_path):
    network = ours("swin_tiny_w14", padding="attended")
    state = dict(network.state_dict())
    for number in range(2):
        key = f"layers.3.blocks.{number}.attn.relative_position_bias_table"
        state[key] = resize_table(state[key], 7)
    state["head.mlp.0.weight"] = torch.zeros(2, 192)
    backbone, report = backbones.load(saved(tmp_path / "checkpoint.pth", {"teacher": state}))
    assert "2 bias tables of a window smaller than 14" in str(report)
    middle = backbone.get_parameter("layers.3.blocks.0.attn.relative_position_bias_table")
    assert middle.shape == (27 * 27, 24)
    assert torch.equal(resize_table(middle, 7), state["layers.3.blocks.0.attn.relative_position_bias_table"])


def test_ibots_swin(tmp_path):
    network = ours(mask_token=True, padding="attended")
    state = published(network)
    state["masked_embed"] = state.pop("mask_token")[0]
    backbone, report = backbones.load(saved(tmp_path / "ibot.pth", {"state_dict": state}))
    assert report.layout == "iBOT Swin"
    assert torch.equal(backbone.mask_token, network.mask_token)
    assert same(backbone, network, 96)


def test_simmims_encoder(tmp_path):
    network = ours(mask_token=True)
    state = {f"encoder.{key}": value for key, value in published(network).items()}
    path = saved(tmp_path / "simmim.pth", {"model": state | {"decoder.0.weight": torch.zeros(1)}})
    backbone, report = backbones.load(path)
    assert same(backbone, network)
    assert "decoder.0.weight" in report.unexpected


@pytest.mark.parametrize(("small", "large"), [(7, 14), (3, 7), (7, 7), (1, 2)])
def test_a_table_widened_and_cut_again_is_the_same(small, large):
    table = torch.randn((2 * small - 1) ** 2, 3)
    wide = resize_table(table, large)
    assert math.isqrt(len(wide)) == 2 * large - 1
    assert torch.equal(resize_table(wide, small), table)
    assert wide.sum().isclose(table.sum())


@pytest.mark.parametrize(
    ("windows", "fits"),
    [
        ([7, 7, 7, 7], True),
        ([14, 14, 14, 7], True),
        ([7, 7, 6, 3], True),
        ([7, 6, 3, 2], True),
        ([12, 12, 12, 6], True),
        ([7, 7, 14, 7], False),
        ([14, 14, 7, 7], False),
        ([7, 14, 14, 14], False),
        ([14, 14, 14, 3], False),
    ],
)
def test_only_windows_that_a_small_map_explains_become_one(windows, fits):
    tables = {
        f"layers.{stage}.blocks.{block}.attn.relative_position_bias_table": torch.ones(
            (2 * window - 1) ** 2, 1
        )
        for stage, window in enumerate(windows)
        for block in range(2)
    }
    if fits:
        notes = widen_tables(tables)
        assert bool(notes) == (len(set(windows)) > 1)
        assert {len(table) for table in tables.values()} == {(2 * windows[0] - 1) ** 2}
    else:
        with pytest.raises(ValueError, match=rf"windows .* are \[{', '.join(map(str, windows))}\]"):
            widen_tables(tables)


def test_a_swin_whose_stages_have_windows_of_their_own_is_refused(tmp_path):
    timm = pytest.importorskip("timm")
    theirs = timm.create_model("swin_s3_tiny_224", embed_dim=24, depths=(2, 2, 2, 2))
    with pytest.raises(ValueError, match=r"s3\.pth: the windows .* \[7, 7, 14, 7\]"):
        backbones.load(saved(tmp_path / "s3.pth", theirs.state_dict()))


def test_swin_v2_is_refused(tmp_path):
    torchvision = pytest.importorskip("torchvision")
    with torch.device("meta"):
        theirs = torchvision.models.swin_v2_t()
    state = {
        key: torch.zeros(value.shape)
        for key, value in theirs.state_dict().items()
        if ".1." in key or ".0." in key
    }
    with pytest.raises(ValueError, match=r"v2\.pth is a Swin V2"):
        backbones.load(saved(tmp_path / "v2.pth", state))


def test_other_depths_than_the_third_are_refused(tmp_path):
    timm = pytest.importorskip("timm")
    theirs = timm.create_model("swin_tiny_patch4_window7_224", embed_dim=24, depths=(2, 4, 2, 2))
    with pytest.raises(ValueError, match=r"a\.pth.*\[2, 4, 2, 2\] blocks"):
        backbones.load(saved(tmp_path / "a.pth", theirs.state_dict()))
