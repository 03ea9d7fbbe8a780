"""ViT against timm's with the same weights, in float64."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling import backbones
from nestling.backbones.vit import ViT

timm = pytest.importorskip("timm")

SMALL = {"embed_dim": 64, "depth": 3, "num_heads": 4}


def vit(name: str, **options) -> ViT:
    """Ours, every weight moved off its initial value, where a mistake could hide."""
    torch.manual_seed(0)
    model = backbones.create(name, **{**SMALL, **options}).double().eval()
    assert isinstance(model, ViT)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def table_at(model: ViT, grid: tuple[int, int], antialias: bool) -> Tensor:
    """Our table of positions resized by torch, the class token's entry before it."""
    cls, table = model.pos_embed[:, :1], model.pos_embed[:, 1:]
    side = round(table.shape[1] ** 0.5)
    image = table.unflatten(1, (side, side)).permute(0, 3, 1, 2)
    image = F.interpolate(image, size=grid, mode="bicubic", align_corners=False, antialias=antialias)
    return torch.cat([cls, image.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)


def state_of(model: ViT, grid: tuple[int, int] | None = None, antialias: bool = False) -> dict[str, Tensor]:
    """Our weights under timm's names, whose class token, beside registers, has our position folded in."""
    state = dict(model.state_dict())
    if grid is not None:
        state["pos_embed"] = table_at(model, grid, antialias)
    if "register_tokens" in state:
        state["reg_token"] = state.pop("register_tokens")
        state["cls_token"] = state["cls_token"] + state["pos_embed"][:, :1]
        state["pos_embed"] = state["pos_embed"][:, 1:]
    return {
        key.replace("mlp.w12", "mlp.fc1").replace("mlp.w3", "mlp.fc2"): value for key, value in state.items()
    }


@torch.no_grad()
def largest_difference(ours: ViT, theirs: nn.Module, images: Tensor) -> float:
    features, tokens = ours(images), theirs.forward_features(images)
    cls, patches = tokens[:, :1], tokens[:, theirs.num_prefix_tokens :]
    return torch.cat([features.cls[:, None] - cls, features.patches - patches], dim=1).abs().max().item()


def images_of(*size: int) -> Tensor:
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "theirs", "options", "their_options"),
    [
        ("vit_small_p16", "vit_small_patch16_224", {}, {}),
        ("vit_small_p16", "vit_small_patch16_224", {"qkv_bias": False}, {"qkv_bias": False}),
        ("vit_small_p8", "vit_small_patch8_224", {"depth": 1}, {"depth": 1}),
        ("vit_small_p14", "vit_small_patch14_dinov2", {"layer_scale": 0.5}, {"img_size": 224}),
        (
            "vit_small_p14",
            "vit_small_patch14_reg4_dinov2",
            {"layer_scale": 0.5, "registers": 4},
            {"img_size": 224},
        ),
        ("vit_giant_p14", "vit_giant_patch14_dinov2", {"embed_dim": 96}, {"embed_dim": 96, "img_size": 224}),
    ],
)
def test_features_at_224_equal_timm(name, theirs, options, their_options):
    ours = vit(name, **options)
    twin = timm.create_model(theirs, num_classes=0, **{**SMALL, **their_options}).double().eval()
    twin.load_state_dict(state_of(ours), strict=True)
    assert largest_difference(ours, twin, images_of(224, 224)) < 1e-9


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("size", [(96, 96), (160, 160), (64, 128), (16, 16), (16, 240)])
def test_features_elsewhere_equal_timm_built_for_that_size(size, antialias):
    ours = vit("vit_small_p16", interpolate_antialias=antialias)
    twin = timm.create_model("vit_small_patch16_224", num_classes=0, img_size=size, **SMALL).double().eval()
    twin.load_state_dict(
        state_of(ours, grid=(size[0] // 16, size[1] // 16), antialias=antialias), strict=True
    )
    assert largest_difference(ours, twin, images_of(*size)) < 1e-9


@pytest.mark.parametrize("size", [(96, 96), (64, 128)])
def test_features_elsewhere_equal_timm_with_dynamic_sizes(size):
    ours = vit("vit_small_p16", interpolate_antialias=True)
    twin = timm.create_model("vit_small_patch16_224", num_classes=0, dynamic_img_size=True, **SMALL)
    twin.double().eval().load_state_dict(state_of(ours), strict=True)
    # It interpolates in float32 whatever the precision of the rest.
    assert largest_difference(ours, twin, images_of(*size)) < 1e-5


@pytest.mark.slow
def test_the_published_small_model_equals_timm():
    ours = vit("vit_small_p16", embed_dim=384, depth=12, num_heads=6)
    twin = timm.create_model("vit_small_patch16_224", num_classes=0).double().eval()
    twin.load_state_dict(state_of(ours), strict=True)
    assert largest_difference(ours, twin, images_of(224, 224)) < 1e-9


def rope_angles_as_written(grid: list[int], head_dim: int, base: float) -> Tensor:
    """Sines and cosines of DINOv3's angles, as timm lays them out: (N, 2 D)."""
    rows = []
    for row in range(grid[0]):
        for column in range(grid[1]):
            coordinates = (2 * row + 1) / grid[0] - 1, (2 * column + 1) / grid[1] - 1
            periods = [base ** (2 * plane / (head_dim // 2)) for plane in range(head_dim // 4)]
            angles = [2 * torch.pi * coordinate / p for coordinate in coordinates for p in periods]
            angles = torch.tensor([*angles, *angles], dtype=torch.float64)
            rows.append(torch.cat([angles.sin(), angles.cos()]))
    return torch.stack(rows)


def rope_twins(registers: int = 4) -> tuple[ViT, nn.Module]:
    options = {"layer_scale": 0.5, "registers": registers, "qkv_bias": False, "position": "rope"}
    ours = vit("vit_small_p16", **options)
    twin = timm.create_model(
        "vit_small_patch16_dinov3",
        num_classes=0,
        num_reg_tokens=registers,
        norm_layer=partial(nn.LayerNorm, eps=1e-6),
        **SMALL,
    )
    state = {
        key.replace("register_tokens", "reg_token")
        .replace("ls1.gamma", "gamma_1")
        .replace("ls2.gamma", "gamma_2"): x
        for key, x in ours.state_dict().items()
    }
    twin.double().eval().load_state_dict(state, strict=True)
    return ours, twin


@pytest.mark.parametrize("size", [(64, 64), (128, 32), (16, 256)])
def test_rope_equals_timms_dinov3_on_grids_whose_coordinates_float32_holds(size):
    ours, twin = rope_twins()
    twin.rope.periods.copy_(100.0 ** (torch.arange(4, dtype=torch.float64) / 4))  # it builds them in float32
    assert largest_difference(ours, twin, images_of(*size)) < 1e-9


@pytest.mark.parametrize("size", [(224, 224), (96, 96), (64, 112)])
def test_rope_equals_timms_dinov3_given_angles_in_float64(size):
    ours, twin = rope_twins()
    assert largest_difference(ours, twin, images_of(*size)) < 1e-4
    twin.rope.get_embed = lambda shape, dtype=None: rope_angles_as_written(shape, 16, 100.0)
    assert largest_difference(ours, twin, images_of(*size)) < 1e-9


def test_training_gradients_equal_timm():
    ours = vit("vit_small_p14", layer_scale=0.5, registers=4).train()
    twin = timm.create_model("vit_small_patch14_reg4_dinov2", num_classes=0, img_size=224, **SMALL)
    twin.double().train().load_state_dict(state_of(ours), strict=True)
    images = images_of(224, 224)[:1]
    features, tokens = ours(images), twin.forward_features(images)
    weight = torch.randn(1, 1 + 256, 64, dtype=torch.float64)
    (torch.cat([features.cls[:, None], features.patches], dim=1) * weight).sum().backward()
    (torch.cat([tokens[:, :1], tokens[:, 5:]], dim=1) * weight).sum().backward()

    theirs = {key: parameter.grad for key, parameter in twin.named_parameters()}
    theirs["register_tokens"] = theirs.pop("reg_token")
    theirs["pos_embed"] = torch.cat([theirs["cls_token"], theirs["pos_embed"]], dim=1)
    for key, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[key], rtol=1e-9, atol=1e-9, msg=key)


@pytest.mark.parametrize("patch", [16, 14, 8])
@pytest.mark.parametrize("size", ["tiny", "small", "base", "large", "giant"])
def test_every_name_has_timms_parameters(size, patch):
    theirs = "vit_giant_patch14_dinov2" if size == "giant" else f"vit_{size}_patch16_224"
    with torch.device("meta"):
        ours = backbones.create(f"vit_{size}_p{patch}")
        twin = timm.create_model(theirs, num_classes=0, img_size=224, patch_size=patch)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in twin.parameters())
    assert ours.blocks[0].attn.num_heads == twin.blocks[0].attn.num_heads
    assert ours.blocks[0].mlp.__class__.__name__ == ("SwiGLU" if size == "giant" else "Mlp")
