"""Hugging Face's ViT, DINOv2 (with and without registers) and Swin: from its files to ours and back.

Its files hold query, key and value apart, under the names that transformers wrote from the start;
newer versions call them otherwise in memory, and both are read. Its Swin attends padded tokens. Its
ViT runs layer norms with an epsilon of 1e-12 where the networks it was made for (Google's, DINO's) were
trained with 1e-6, as ours runs them: random weights differ by up to 1e-3 there, and a note says so.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nestling.backbones.features import Backbone
from nestling.backbones.swin import Swin
from nestling.backbones.vit import ViT
from nestling.backbones.weights.dino import EXACT, SCALED
from nestling.backbones.weights.identify import options_of, with_position_table
from nestling.backbones.weights.layout import Converted, join, rename, split, take
from nestling.backbones.weights.swin import BUFFERS, add_tables, widen_tables

EPS = {"vit": 1e-6, "swin": 1e-5}
STEM = "patch_embeddings.projection.weight"
LIBRARY_EPS = {"ViT": 1e-12}  # where it differs, unless config.json says otherwise

# From old names and new ones to ours; query, key and value stay apart until `join`.
VIT_RULES = [
    (r"(vit|dinov2_with_registers|dinov2)\.", ""),
    (r"embeddings\.position_embeddings$", "pos_embed"),
    (r"embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"embeddings\.(cls_token|mask_token|register_tokens)$", r"\1"),
    (r"layernorm\.", "norm."),
    (r"(encoder\.layer|layers)\.(\d+)\.", r"blocks.\2."),
    (r"(blocks\.\d+)\.attention\.(attention\.)?(query|key|value)\.", r"\1.attn.\3."),
    (r"(blocks\.\d+)\.attention\.([qkv])_proj\.", r"\1.attn.\2_proj."),
    (r"(blocks\.\d+)\.attention\.(output\.dense|o_proj)\.", r"\1.attn.proj."),
    (r"(blocks\.\d+)\.(intermediate\.dense|mlp\.fc1)\.", r"\1.mlp.fc1."),
    (r"(blocks\.\d+)\.(output\.dense|mlp\.fc2)\.", r"\1.mlp.fc2."),
    (r"(blocks\.\d+)\.mlp\.weights_in\.", r"\1.mlp.w12."),
    (r"(blocks\.\d+)\.mlp\.(weights_out|down_proj)\.", r"\1.mlp.w3."),
    (r"(blocks\.\d+)\.layernorm_before\.", r"\1.norm1."),
    (r"(blocks\.\d+)\.layernorm_after\.", r"\1.norm2."),
    (r"(blocks\.\d+)\.layer_scale(\d)\.lambda1$", r"\1.ls\2.gamma"),
]
SWIN_RULES = [
    (r"swin\.", ""),
    (r"embeddings\.position_embeddings$", "absolute_pos_embed"),
    (r"embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"embeddings\.norm\.", "patch_embed.norm."),
    (r"embeddings\.mask_token$", "mask_token"),
    (r"layernorm\.", "norm."),
    (r"encoder\.layers\.", "layers."),
    (r"(layers\.\d\.blocks\.\d+)\.attention\.(self|relative_position_bias)\.relative_", r"\1.attn.relative_"),
    (r"(layers\.\d\.blocks\.\d+)\.attention\.self\.(query|key|value)\.", r"\1.attn.\2."),
    (r"(layers\.\d\.blocks\.\d+)\.attention\.([qkv])_proj\.", r"\1.attn.\2_proj."),
    (r"(layers\.\d\.blocks\.\d+)\.attention\.(output\.dense|o_proj)\.", r"\1.attn.proj."),
    (r"(layers\.\d\.blocks\.\d+)\.intermediate\.dense\.", r"\1.mlp.fc1."),
    (r"(layers\.\d\.blocks\.\d+)\.output\.dense\.", r"\1.mlp.fc2."),
    (r"(layers\.\d\.blocks\.\d+)\.layernorm_before\.", r"\1.norm1."),
    (r"(layers\.\d\.blocks\.\d+)\.layernorm_after\.", r"\1.norm2."),
]


def convert(tensors: dict[str, Tensor], config: Mapping[str, Any]) -> Converted:
    """Our keys from Hugging Face's; `config` is its config.json, or empty; one of another width is not used.

    Raises ValueError for an activation that ours is not.
    """
    is_swin = any(".relative_position_bias" in key for key in tensors)
    family = "swin" if is_swin else "vit"
    stem = next(value for key, value in tensors.items() if key.endswith(STEM))
    if config.get("embed_dim" if is_swin else "hidden_size") != len(stem):
        config = {}
    if config.get("hidden_act", "gelu") != "gelu":
        raise ValueError(f"hidden_act={config['hidden_act']!r} in config.json: only gelu is ours")
    tensors = rename(tensors, SWIN_RULES if is_swin else VIT_RULES)
    left_out = take(tensors, BUFFERS)
    for kind in ("weight", "bias"):
        for names in (("query", "key", "value"), ("q_proj", "k_proj", "v_proj")):
            join(tensors, [f".attn.{name}.{kind}" for name in names], f".attn.qkv.{kind}")
        join(tensors, [f".mlp.{name}_proj.{kind}" for name in ("gate", "up")], f".mlp.w12.{kind}")
    if "mask_token" in tensors:
        tensors["mask_token"] = tensors["mask_token"].reshape(1, 1, -1)
    notes = widen_tables(tensors) if is_swin else []
    options: dict[str, Any] = {"padding": "attended"}
    layout = "Swin"
    if not is_swin:
        layout, options = _vit_settings(tensors)
    theirs = config.get("layer_norm_eps", LIBRARY_EPS.get(layout, EPS[family]))
    if theirs != EPS[family]:
        notes.append(f"layer norms run with epsilon {EPS[family]:g}, in transformers with {theirs:g}")
    heads = config.get("num_attention_heads")
    if isinstance(heads, int) and not is_swin:
        options["num_heads"] = heads
    return Converted(family, f"Hugging Face {layout}", tensors, options, left_out, notes)


def _vit_settings(tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Any]]:
    if "register_tokens" in tensors:
        return "DINOv2 with registers", dict(EXACT)
    if "blocks.0.ls1.gamma" in tensors:
        return "DINOv2", dict(SCALED)
    return "ViT", {}


class HuggingFaceModel(NamedTuple):
    """config.json and the tensors of a folder that transformers' from_pretrained loads."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


VIT_NAMES = {
    "plain": [
        (r"(blocks\.\d+)\.norm1\.", r"\1.layernorm_before."),
        (r"(blocks\.\d+)\.norm2\.", r"\1.layernorm_after."),
        (r"(blocks\.\d+)\.mlp\.fc1\.", r"\1.intermediate.dense."),
        (r"(blocks\.\d+)\.mlp\.fc2\.", r"\1.output.dense."),
    ],
    "dinov2": [
        (r"(blocks\.\d+)\.ls(\d)\.gamma$", r"\1.layer_scale\2.lambda1"),
        (r"(blocks\.\d+)\.mlp\.w12\.", r"\1.mlp.weights_in."),
        (r"(blocks\.\d+)\.mlp\.w3\.", r"\1.mlp.weights_out."),
    ],
    "both": [
        (r"pos_embed$", "embeddings.position_embeddings"),
        (r"patch_embed\.proj\.", "embeddings.patch_embeddings.projection."),
        (r"(cls_token|mask_token|register_tokens)$", r"embeddings.\1"),
        (r"norm\.", "layernorm."),
        (r"(blocks\.\d+)\.attn\.(query|key|value)\.", r"\1.attention.attention.\2."),
        (r"(blocks\.\d+)\.attn\.proj\.", r"\1.attention.output.dense."),
        (r"blocks\.", "encoder.layer."),
    ],
}
SWIN_NAMES = [
    (r"absolute_pos_embed$", "embeddings.position_embeddings"),
    (r"patch_embed\.proj\.", "embeddings.patch_embeddings.projection."),
    (r"patch_embed\.norm\.", "embeddings.norm."),
    (r"norm\.", "layernorm."),
    (r"(layers\.\d\.blocks\.\d+)\.attn\.proj\.", r"\1.attention.output.dense."),
    (r"(layers\.\d\.blocks\.\d+)\.attn\.", r"\1.attention.self."),
    (r"(layers\.\d\.blocks\.\d+)\.mlp\.fc1\.", r"\1.intermediate.dense."),
    (r"(layers\.\d\.blocks\.\d+)\.mlp\.fc2\.", r"\1.output.dense."),
    (r"(layers\.\d\.blocks\.\d+)\.norm1\.", r"\1.layernorm_before."),
    (r"(layers\.\d\.blocks\.\d+)\.norm2\.", r"\1.layernorm_after."),
    (r"layers\.", "encoder.layers."),
]


def to_huggingface(backbone: Backbone, size: int = 224) -> HuggingFaceModel:
    """The same network as transformers' ViTModel, Dinov2Model, Dinov2WithRegistersModel or SwinModel.

    Registers, layer scale and a gated network make it a DINOv2, whose missing layer scale is one of
    ones. Equal at the position table's size; elsewhere transformers' own interpolation holds. A
    Swin without a table is meant for images of `size` pixels and more. Pyramid layers stay behind,
    and so does the mask token where the target has none.

    Raises ValueError for what they can't hold.
    """
    options = options_of(backbone)
    if not isinstance(backbone, ViT | Swin):
        raise ValueError(f"{backbone.name} is an XCiT, which transformers does not have; export it to timm")
    tensors = dict(backbone.state_dict())
    take(tensors, r"fpn\d\..*|norm[0-3]\..*")
    for kind in ("weight", "bias"):
        split(tensors, f".attn.qkv.{kind}", [f".attn.{part}.{kind}" for part in ("query", "key", "value")])
    config: dict[str, Any] = {
        "num_channels": options["in_chans"],
        "patch_size": options["patch"],
        "qkv_bias": options["qkv_bias"],
        "hidden_act": "gelu",
        "torch_dtype": str(tensors["norm.weight"].dtype).removeprefix("torch."),
    }
    if isinstance(backbone, Swin):
        options.setdefault("position_size", size)
        return _swin_to_huggingface(backbone.name, options, config, tensors)
    return _vit_to_huggingface(backbone.name, options, config, tensors)


def _vit_to_huggingface(
    name: str, options: dict[str, Any], config: dict[str, Any], tensors: dict[str, Tensor]
) -> HuggingFaceModel:
    tensors = with_position_table(tensors, options, name, "transformers")
    config |= {
        "hidden_size": options["embed_dim"],
        "num_hidden_layers": options["depth"],
        "num_attention_heads": options["num_heads"],
        "image_size": options["position_size"],
        "layer_norm_eps": EPS["vit"],
    }
    if not (options["registers"] or options["layer_scale"] or options["ffn"] == "swiglu"):
        tensors.pop("mask_token", None)
        config |= {"model_type": "vit", "architectures": ["ViTModel"]}
        config["intermediate_size"] = len(tensors["blocks.0.mlp.fc1.weight"])
        return HuggingFaceModel(config, rename(tensors, VIT_NAMES["plain"] + VIT_NAMES["both"]))
    if options["mlp_ratio"] != int(options["mlp_ratio"]):
        raise ValueError(
            f"mlp_ratio={options['mlp_ratio']} of {name} has no form in transformers, "
            "whose DINOv2 takes whole ones"
        )
    config |= {"mlp_ratio": int(options["mlp_ratio"]), "use_swiglu_ffn": options["ffn"] == "swiglu"}
    if options["registers"]:
        config |= {"model_type": "dinov2_with_registers", "architectures": ["Dinov2WithRegistersModel"]}
        config["num_register_tokens"] = options["registers"]
        tensors.setdefault("mask_token", torch.zeros_like(tensors["cls_token"]))
    else:
        config |= {"model_type": "dinov2", "architectures": ["Dinov2Model"]}
        config["use_mask_token"] = "mask_token" in tensors
    if "mask_token" in tensors:
        tensors["mask_token"] = tensors["mask_token"].flatten(0, 1)
    for number in range(options["depth"]):
        for part in "12":
            tensors.setdefault(f"blocks.{number}.ls{part}.gamma", torch.ones_like(tensors["norm.weight"]))
    return HuggingFaceModel(config, rename(tensors, VIT_NAMES["dinov2"] + VIT_NAMES["both"]))


def _swin_to_huggingface(
    name: str, options: dict[str, Any], config: dict[str, Any], tensors: dict[str, Tensor]
) -> HuggingFaceModel:
    size, window = options["position_size"], options["window"]
    if -(-size // (8 * options["patch"])) < window:
        raise ValueError(
            f"window={window} of {name} has no form in transformers for images of {size} pixels: "
            "its Swin fails where the last map is smaller than the window, below "
            f"{8 * options['patch'] * window} pixels"
        )
    add_tables(tensors, options)
    tensors.pop("mask_token", None)
    config |= {
        "model_type": "swin",
        "architectures": ["SwinModel"],
        "image_size": size,
        "embed_dim": options["embed_dim"],
        "depths": [2, 2, options["depth"], 2],
        "num_heads": [options["num_heads"] << stage for stage in range(4)],
        "window_size": window,
        "mlp_ratio": options["mlp_ratio"],
        "use_absolute_embeddings": options["position"] in ("absolute", "both"),
        "layer_norm_eps": EPS["swin"],
    }
    return HuggingFaceModel(config, rename(tensors, SWIN_NAMES))
