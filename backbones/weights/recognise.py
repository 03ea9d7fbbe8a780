"""Which layout a set of keys is."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from nestling.backbones.weights import dino, huggingface, swin, timm, torchvision, xcit
from nestling.backbones.weights.folders import config_beside
from nestling.backbones.weights.layout import Converted
from nestling.backbones.weights.report import shorten

Reader = Callable[[dict[str, Tensor]], Converted]

KNOWN = (
    "DINO, iBOT and DINOv2 ViTs; XCiT; Swin and EsViT; timm's ViT, XCiT and Swin; "
    "torchvision's ViT and Swin; Hugging Face's ViT, DINOv2 and Swin; nestling's own runs and exports"
)


def convert(tensors: dict[str, Tensor], heads: tuple[str, ...], file: Path) -> Converted:
    """The tensors under our keys, by the layout that the keys show.

    `heads` are the keys beside the backbone. A config.json beside the file is asked where a layout needs
    it. Raises ValueError for no known layout, naming the file.
    """
    if any(key.endswith(huggingface.STEM) for key in tensors):
        config, problem = config_beside(file), ""
        reader: Reader | None = partial(huggingface.convert, config=config)
    else:
        config, problem = _config_if_any(file)
        reader = _reader(tensors, heads, config)
    if reader is None:
        raise ValueError(
            f"{file} is in no known layout: its keys are {shorten(list(tensors))}; known are {KNOWN}"
        )
    _refuse_successors(tensors, file)
    try:
        converted = reader(tensors)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    converted.notes += [problem] * bool(problem)
    return converted


def _config_if_any(file: Path) -> tuple[dict[str, Any], str]:
    """The config of a file that can do without, else empty; and a note where it is damaged."""
    try:
        return config_beside(file), ""
    except ValueError as error:
        return {}, f"not used: {error}"


def _reader(tensors: dict[str, Tensor], heads: tuple[str, ...], config: Mapping[str, Any]) -> Reader | None:
    if "conv_proj.weight" in tensors and "class_token" in tensors:
        return torchvision.convert_vit
    if "features.0.0.weight" in tensors and "features.1.0.attn.qkv.weight" in tensors:
        return torchvision.convert_swin
    if "cls_attn_blocks.0.attn.qkv.weight" in tensors:
        return xcit.convert
    if "cls_attn_blocks.0.attn.q.weight" in tensors:
        return partial(timm.convert_xcit, config=config)
    if "layers.0.blocks.0.attn.qkv.weight" in tensors:
        if "layers.3.downsample.reduction.weight" in tensors:
            return timm.convert_swin
        # EsViT trains a student with projection heads; Swin's own files end in one linear head.
        is_esvit = any(
            key.startswith(("head.mlp", "head_dense", "head.last_layer")) for key in (*tensors, *heads)
        )
        return lambda given: swin.convert(given, is_esvit)
    if "patch_embed.proj.weight" in tensors and any(key.startswith("blocks.0.") for key in tensors):
        return partial(timm.convert_vit, config=config) if _is_timm_vit(tensors, config) else dino.convert
    return None


def _is_timm_vit(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> bool:
    """What only timm writes: its config, a linear classifier, its names of registers and of the last norm.

    Layer scale without DINOv2's mask token is timm's too, as is a class-less file.
    """
    if timm.fits(config, "vit", tensors):
        return True
    if {"reg_token", "fc_norm.weight", "head.weight"} & tensors.keys():
        return True
    scaled = any(key.endswith(".ls1.gamma") for key in tensors)
    return scaled and "mask_token" not in tensors


def _refuse_successors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Swin v2 looks like Swin to its keys, but scales its attention in another way."""
    other = [key for key in tensors if ".cpb_mlp." in key or key.endswith(".logit_scale")]
    if other:
        raise ValueError(
            f"{file} is a Swin V2 ({other[0]}), which is no family here; create('timm:...') has it"
        )
