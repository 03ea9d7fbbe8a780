"""Which registered network a set of tensors is: the name whose defaults fit, the rest as options."""

import inspect
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from nestling.backbones import swin, vit, xcit
from nestling.backbones.class_attention import ClassAttentionBlock
from nestling.backbones.features import Backbone
from nestling.backbones.self_attention import Attention
from nestling.backbones.weights.layout import grid_side

# Heads of the ViT sizes in use (H, g, G: Zhai et al., 2022; the others are DINOv2's and DeiT's).
HEADS = {192: 3, 384: 6, 768: 12, 1024: 16, 1280: 16, 1408: 16, 1536: 24, 1664: 16}

FAMILIES: dict[str, tuple[type[Backbone], dict[str, dict[str, Any]]]] = {
    "vit": (vit.ViT, dict(vit.variants())),
    "swin": (swin.Swin, dict(swin.variants())),
    "xcit": (xcit.XCiT, dict(xcit.variants())),
}


def identify(family: str, tensors: Mapping[str, Tensor], known: Mapping[str, Any]) -> dict[str, Any]:
    """All options that the tensors and what is `known` settle.

    Raises ValueError where the tensors are no network of the family.
    """
    read = {"vit": _vit, "swin": _swin, "xcit": _xcit}[family]
    try:
        return {**read(tensors, known), **known}
    except KeyError as error:
        raise ValueError(f"these tensors are no {family}: {error.args[0]} is missing") from error


def nearest_name(family: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The registered name that needs the fewest further options, and those."""
    _, variants = FAMILIES[family]
    rests = {name: beyond_defaults(name, options) for name in variants}
    name = min(rests, key=lambda each: len(rests[each]))
    return name, rests[name]


def family_of(name: str) -> str | None:
    """The family that a registered name belongs to; None for an adapter's or an unknown one."""
    return next((family for family, (_, variants) in FAMILIES.items() if name in variants), None)


def beyond_defaults(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that differ from what the name stands for.

    A layer scale's initial value says nothing about trained weights: only whether there is one counts.
    """
    family = family_of(name)
    assert family is not None, name
    network, variants = FAMILIES[family]
    parameters = inspect.signature(network).parameters
    defaults = {key: value.default for key, value in parameters.items()} | variants[name]

    def same(key: str, value: Any) -> bool:
        if key == "layer_scale":
            return bool(value) == bool(defaults[key])
        return key in defaults and bool(value == defaults[key])

    return {key: value for key, value in options.items() if not same(key, value)}


def ratio_of(hidden: int, dim: int) -> float:
    """The ratio from which int(dim * ratio) gives back `hidden`."""
    ratio = hidden / dim
    return ratio if int(dim * ratio) == hidden else (hidden + 0.5) / dim


def count(tensors: Mapping[str, Tensor], prefix: str) -> int:
    """How many numbered modules lie under a prefix."""
    pattern = re.compile(re.escape(prefix) + r"\.(\d+)\.")
    numbers = {int(match[1]) for key in tensors if (match := pattern.match(key))}
    if not numbers:
        raise KeyError(f"{prefix}.0")
    return max(numbers) + 1


def _stem(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    weight = tensors["patch_embed.proj.weight"]
    return {"in_chans": weight.shape[1], "patch": weight.shape[-1]}


def _vit(tensors: Mapping[str, Tensor], known: Mapping[str, Any]) -> dict[str, Any]:
    dim = tensors["cls_token"].shape[-1]
    options = _stem(tensors) | {
        "embed_dim": dim,
        "depth": count(tensors, "blocks"),
        "num_heads": known.get("num_heads") or _usual_heads(dim),
        "qkv_bias": "blocks.0.attn.qkv.bias" in tensors,
        "layer_scale": 1e-5 if "blocks.0.ls1.gamma" in tensors else 0.0,
        "registers": tensors["register_tokens"].shape[1] if "register_tokens" in tensors else 0,
        "mask_token": "mask_token" in tensors,
        "pyramid": _has(tensors, "fpn"),
    }
    if "blocks.0.mlp.w12.weight" in tensors:
        options |= {
            "ffn": "swiglu",
            "mlp_ratio": _gated_ratio(len(tensors["blocks.0.mlp.w12.weight"]) // 2, dim),
        }
    else:
        options |= {"ffn": "mlp", "mlp_ratio": ratio_of(len(tensors["blocks.0.mlp.fc1.weight"]), dim)}
    if "pos_embed" in tensors:
        side = grid_side(tensors["pos_embed"].shape[1] - 1, "pos_embed without the class")
        return options | {"position": "learned", "position_size": side * options["patch"]}
    if "position" not in known:
        raise ValueError(
            "these tensors are a vit without a position table, and don't show which positions it was trained "
            'with; say position="none", "sincos2d" or "rope"'
        )
    return options


def assumptions(family: str, settled: Mapping[str, Any], known: Mapping[str, Any]) -> list[str]:
    """A note where `identify` had to assume what no tensor shows."""
    if family != "vit" or known.get("num_heads") or settled["embed_dim"] in HEADS:
        return []
    heads = settled["num_heads"]
    return [f"num_heads assumed to be width / 64 = {heads}; give num_heads where the network has others"]


def _usual_heads(dim: int) -> int:
    if dim in HEADS:
        return HEADS[dim]
    if dim % 64:
        raise ValueError(f"these tensors are a vit of width {dim}, no multiple of 64; give num_heads")
    return dim // 64


def _gated_ratio(hidden: int, dim: int) -> float:
    """The ratio of the plain network that a gated one of `hidden` units stands for: 4 where that fits."""
    for ratio in (4.0, 1.5 * hidden / dim):
        if (int(int(dim * ratio) * 2 / 3) + 7) // 8 * 8 == hidden:
            return ratio
    return ratio_of(int(1.5 * hidden), dim)


def _swin(tensors: Mapping[str, Tensor], known: Mapping[str, Any]) -> dict[str, Any]:
    dim = tensors["patch_embed.proj.weight"].shape[0]
    depths = [count(tensors, f"layers.{stage}.blocks") for stage in range(4)]
    if [depths[0], depths[1], depths[3]] != [2, 2, 2]:
        raise ValueError(
            f"these tensors are a swin of {depths} blocks; only the third number may be another than 2"
        )
    table = tensors.get("layers.0.blocks.0.attn.relative_position_bias_table")
    absolute = tensors.get("absolute_pos_embed")
    options = _stem(tensors) | {
        "embed_dim": dim,
        "depth": depths[2],
        "num_heads": known.get("num_heads") or (dim // 32 if table is None else table.shape[1]),
        "qkv_bias": "layers.0.blocks.0.attn.qkv.bias" in tensors,
        "mlp_ratio": ratio_of(len(tensors["layers.0.blocks.0.mlp.fc1.weight"]), dim),
        "mask_token": "mask_token" in tensors,
        "pyramid": _has(tensors, "norm0."),
        "position": {(1, 1): "both", (1, 0): "relative", (0, 1): "absolute", (0, 0): "none"}[
            (table is not None, absolute is not None)
        ],
    }
    if table is not None:
        options["window"] = (grid_side(len(table), "relative_position_bias_table") + 1) // 2
    if absolute is not None:
        options["position_size"] = grid_side(absolute.shape[1], "absolute_pos_embed") * options["patch"]
    return options


def _xcit(tensors: Mapping[str, Tensor], known: Mapping[str, Any]) -> dict[str, Any]:
    dim = tensors["cls_token"].shape[-1]
    if "patch_embed.proj.weight" in tensors:
        stem = _stem(tensors) | {"stem": "linear"}
    else:
        convs = sum(bool(re.fullmatch(r"patch_embed\.proj\.\d+\.0\.weight", key)) for key in tensors)
        first = tensors["patch_embed.proj.0.0.weight"]
        stem = {"stem": "conv", "patch": 2**convs, "in_chans": first.shape[1]}
    return stem | {
        "embed_dim": dim,
        "depth": count(tensors, "blocks"),
        "cls_depth": count(tensors, "cls_attn_blocks"),
        "num_heads": len(tensors["blocks.0.attn.temperature"]),
        "mlp_ratio": ratio_of(len(tensors["blocks.0.mlp.fc1.weight"]), dim),
        "layer_scale": 1.0,
        "mask_token": "mask_token" in tensors,
        "pyramid": _has(tensors, "fpn"),
    }


def _has(tensors: Mapping[str, Tensor], prefix: str) -> bool:
    return any(key.startswith(prefix) for key in tensors)


def options_of(backbone: Backbone) -> dict[str, Any]:
    """A backbone's shape as options. Raises ValueError for one that is no ViT, Swin or XCiT."""
    tensors = backbone.state_dict()
    if isinstance(backbone, vit.ViT):
        attention = backbone.get_submodule("blocks.0.attn")
        assert isinstance(attention, Attention)
        known: dict[str, Any] = {"num_heads": attention.num_heads}
        return identify(
            "vit", tensors, known | ({} if "pos_embed" in tensors else {"position": backbone.position})
        )
    if isinstance(backbone, swin.Swin):
        windows = backbone.get_submodule("layers.0.blocks.0.attn")
        assert isinstance(windows, swin.WindowAttention)
        return identify("swin", tensors, {"num_heads": windows.num_heads, "window": windows.window})
    if isinstance(backbone, xcit.XCiT):
        last = backbone.get_submodule("cls_attn_blocks.0")
        assert isinstance(last, ClassAttentionBlock)
        return identify("xcit", tensors, {"tokens_norm": last.tokens_norm})
    raise ValueError(
        f"{backbone.name} is no ViT, Swin or XCiT of nestling, so its weights have no other layout"
    )


def with_position_table(
    tensors: Mapping[str, Tensor], options: dict[str, Any], name: str, target: str
) -> dict[str, Tensor]:
    """A vit's tensors, `position="none"` as a table of zeros; the options get the table's size.

    Raises ValueError for positions that are no table: no other library's plain ViT has them.
    """
    if options["position"] == "learned":
        return dict(tensors)
    if options["position"] != "none":
        raise ValueError(
            f"position={options['position']!r} of {name} has no form in {target}, which needs a table"
        )
    side = 224 // options["patch"]
    options["position_size"] = side * options["patch"]
    rows = 1 + side * side
    return {**tensors, "pos_embed": tensors["cls_token"].new_zeros(1, rows, options["embed_dim"])}
