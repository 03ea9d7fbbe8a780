"""timm's ViT, XCiT and Swin: from its state dicts to ours and back.

Its ViT resizes positions to the exact grid, antialiased; so do we for its files. With `reg_token` its
table often has no entry for the class (ours gets a row of zeros), or one for each register (added to
the registers, which is the same).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nestling.backbones.features import Backbone
from nestling.backbones.swin import Swin
from nestling.backbones.weights.dino import EXACT
from nestling.backbones.weights.identify import options_of, ratio_of, with_position_table
from nestling.backbones.weights.layout import Converted, join, rename, split, take
from nestling.backbones.weights.swin import BUFFERS, TABLE, add_tables, resize_table, widen_tables
from nestling.backbones.weights.xcit import tokens_norm
from nestling.backbones.xcit import XCiT

VIT_SIZES = {
    dim: f"vit_{size}_patch16_224"
    for dim, size in ((192, "tiny"), (384, "small"), (768, "base"), (1024, "large"))
}


def fits(config: Mapping[str, Any], family: str, tensors: Mapping[str, Tensor]) -> bool:
    """Whether config.json is timm's, and of these tensors: of their family, and as wide where it says so."""
    architecture, width = config.get("architecture"), _width(tensors)
    words = {"vit": ("vit", "deit"), "xcit": ("xcit",)}[family]
    if not isinstance(architecture, str) or "model_type" in config:
        return False
    return any(word in architecture for word in words) and config.get("num_features", width) == width


def _width(tensors: Mapping[str, Tensor]) -> int | None:
    """The width of a ViT or XCiT, by the norm of its first block."""
    norm = tensors.get("blocks.0.norm1.weight")
    return None if norm is None else len(norm)


def _arguments(
    config: Mapping[str, Any], family: str, tensors: Mapping[str, Tensor], kinds: Mapping[str, type]
) -> dict[str, Any]:
    """What config.json's model_args say of the options in `kinds`, which no tensor shows."""
    arguments = config.get("model_args") if fits(config, family, tensors) else None
    if not isinstance(arguments, Mapping):
        return {}
    return {key: arguments[key] for key, kind in kinds.items() if type(arguments.get(key)) is kind}


def convert_vit(tensors: dict[str, Tensor], config: Mapping[str, Any]) -> Converted:
    """Our ViT's keys; `config` is timm's config.json, or empty."""
    options = {**EXACT, **_arguments(config, "vit", tensors, {"num_heads": int})}
    packed = [
        (r"(blocks\.\d+\.mlp)\.fc1\.", r"\1.w12."),
        (r"(blocks\.\d+\.mlp)\.fc2\.", r"\1.w3."),
    ]
    pooled = [(r"fc_norm\.", "norm.")] if "norm.weight" not in tensors else []
    tensors = rename(tensors, pooled + (packed if _is_swiglu(tensors) else []))
    notes = ["fc_norm, trained on the pooled patches, normalises every token"] * bool(pooled)
    registers = tensors.pop("reg_token", None)
    if "pos_embed" in tensors and "cls_token" in tensors:
        _split_positions(tensors, registers)
    elif registers is not None:
        tensors["register_tokens"] = registers
    return Converted("vit", "timm ViT", tensors, options, notes=notes)


def _is_swiglu(tensors: dict[str, Tensor]) -> bool:
    into, out = (tensors.get(f"blocks.0.mlp.{name}.weight") for name in ("fc1", "fc2"))
    return into is not None and out is not None and len(into) == 2 * out.shape[1]


def _split_positions(tensors: dict[str, Tensor], registers: Tensor | None) -> None:
    """The class's row, the registers' rows and the grid, told apart as the grid is square."""
    table, num = tensors["pos_embed"], 0 if registers is None else registers.shape[1]
    rows = table.shape[1]
    square = {prefix for prefix in (0, 1, 1 + num) if int((rows - prefix) ** 0.5) ** 2 == rows - prefix}
    prefix = 1 + num if 1 + num in square else 1 if 1 in square else 0
    if prefix == 0:
        table = torch.cat([torch.zeros_like(table[:, :1]), table], dim=1)
    elif prefix > 1 and registers is not None:
        registers = registers + table[:, 1:prefix]
        table = torch.cat([table[:, :1], table[:, prefix:]], dim=1)
    tensors["pos_embed"] = table
    if registers is not None:
        tensors["register_tokens"] = registers


def convert_xcit(tensors: dict[str, Tensor], config: Mapping[str, Any]) -> Converted:
    """Our XCiT's keys; `config` is timm's config.json, or empty."""
    options = tokens_norm(tensors) | _arguments(config, "xcit", tensors, {"tokens_norm": bool})
    tensors = rename(tensors, [(r"pos_embed\.", "pos_embeder.")])
    for kind in ("weight", "bias"):
        join(tensors, [f".attn.{part}.{kind}" for part in "qkv"], f".attn.qkv.{kind}")
    return Converted("xcit", "timm XCiT", tensors, options)


def convert_swin(tensors: dict[str, Tensor]) -> Converted:
    """Our Swin's keys: timm merges patches at the start of a stage, not at the end of the one before.

    Its tables are as small as the maps of the size it was built for, as the published ones.
    """
    earlier = [(rf"layers\.{stage + 1}\.downsample\.", f"layers.{stage}.downsample.") for stage in range(3)]
    tensors = rename(tensors, earlier)
    left_out = take(tensors, BUFFERS)
    notes = widen_tables(tensors)
    return Converted("swin", "timm Swin", tensors, {"padding": "masked"}, left_out, notes)


class TimmModel(NamedTuple):
    """What `timm.create_model(name, num_classes=0, **arguments)` loads with strict=True."""

    name: str
    arguments: dict[str, Any]
    tensors: dict[str, Tensor]


def to_timm(backbone: Backbone, size: int = 224) -> TimmModel:
    """The same network as timm builds it, with equal features at the size of the position table.

    A Swin, which has none there, is built for images of `size` pixels: its bias tables depend on it.
    At other sizes timm's own ways hold: its ViT resizes positions antialiased, its Swin pads after
    shifting. Mask token and pyramid layers stay behind: plain features need neither.

    Raises ValueError for what timm's networks can't hold.
    """
    options = options_of(backbone)
    tensors = dict(backbone.state_dict())
    take(tensors, r"mask_token|fpn\d\..*|norm[0-3]\..*")
    same = {key: options[key] for key in ("in_chans", "embed_dim", "mlp_ratio")}
    same |= {"patch_size": options["patch"], "drop_path_rate": 0.0}
    if isinstance(backbone, XCiT):
        return _xcit_to_timm(backbone.name, options, same, tensors)
    if isinstance(backbone, Swin):
        return _swin_to_timm(backbone.name, size, options, same, tensors)
    return _vit_to_timm(backbone.name, options, same, tensors)


def _vit_to_timm(
    name: str, options: dict[str, Any], same: dict[str, Any], tensors: dict[str, Tensor]
) -> TimmModel:
    tensors = with_position_table(tensors, options, name, "timm")
    same |= {key: options[key] for key in ("depth", "num_heads", "qkv_bias")}
    same |= {
        "img_size": options["position_size"],
        "reg_tokens": options["registers"],
        "dynamic_img_size": True,
    }
    if options["layer_scale"]:
        same["init_values"] = 1e-5
    model = VIT_SIZES.get(options["embed_dim"], "vit_base_patch16_224")
    tensors = rename(tensors, [(r"register_tokens$", "reg_token")])
    if options["ffn"] == "swiglu":
        model = "vit_giant_patch14_dinov2"  # its layer is gated; everything else is an argument
        same.setdefault("init_values", 0.0)  # that network has a layer scale unless told
        same["mlp_ratio"] = ratio_of(len(tensors["blocks.0.mlp.w12.weight"]), options["embed_dim"])
        tensors = rename(
            tensors, [(r"(blocks\.\d+\.mlp)\.w12\.", r"\1.fc1."), (r"(blocks\.\d+\.mlp)\.w3\.", r"\1.fc2.")]
        )
    if options["registers"]:  # timm's table has a row for each; zeros, not class + row in one, loses no bit
        table = tensors["pos_embed"]
        rows = table.new_zeros(1, options["registers"], table.shape[-1])
        tensors["pos_embed"] = torch.cat([table[:, :1], rows, table[:, 1:]], dim=1)
    return TimmModel(model, same, tensors)


def _xcit_to_timm(
    name: str, options: dict[str, Any], same: dict[str, Any], tensors: dict[str, Tensor]
) -> TimmModel:
    if options["patch"] not in (8, 16):
        raise ValueError(f"patch={options['patch']} of {name} has no form in timm, whose XCiT takes 8 or 16")
    if options["stem"] != "conv":
        raise ValueError(
            f"stem={options['stem']!r} of {name} has no form in timm, whose XCiT has a conv stem"
        )
    same |= {key: options[key] for key in ("depth", "num_heads", "tokens_norm")}
    same |= {"cls_attn_layers": options["cls_depth"], "eta": 1.0}
    tensors = rename(tensors, [(r"pos_embeder\.", "pos_embed.")])
    for kind in ("weight", "bias"):
        split(
            tensors, f".attn.qkv.{kind}", [f".attn.{part}.{kind}" for part in "qkv"], r"cls_attn_blocks\.\d+"
        )
    return TimmModel(f"xcit_small_12_p{options['patch']}_224", same, tensors)


def _swin_to_timm(
    name: str, size: int, options: dict[str, Any], same: dict[str, Any], tensors: dict[str, Tensor]
) -> TimmModel:
    if options["position"] in ("absolute", "both"):
        raise ValueError(
            f"position={options['position']!r} of {name} has no form in timm, "
            "whose Swin has no table of absolute positions"
        )
    add_tables(tensors, options)
    grid = -(-size // options["patch"])
    for stage in range(4):
        for key in [key for key in tensors if key.startswith(f"layers.{stage}.") and key.endswith(TABLE)]:
            tensors[key] = resize_table(tensors[key], min(options["window"], grid)).contiguous()
        grid = (grid + 1) // 2
    later = [(rf"layers\.{stage}\.downsample\.", f"Layers.{stage + 1}.downsample.") for stage in range(3)]
    tensors = rename(tensors, [*later, (r"Layers\.", "layers.")])
    same |= {
        "img_size": size,
        "strict_img_size": False,
        "window_size": options["window"],
        "qkv_bias": options["qkv_bias"],
        "depths": [2, 2, options["depth"], 2],
        "num_heads": [options["num_heads"] << stage for stage in range(4)],
    }
    return TimmModel("swin_tiny_patch4_window7_224", same, tensors)
