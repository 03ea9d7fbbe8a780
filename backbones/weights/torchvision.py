"""torchvision's ViT and Swin.

Its Swin attends padded tokens (`padding="attended"`). Its ViT takes one size only, so that our
interpolation of its table is a free choice.
"""

from torch import Tensor

from nestling.backbones.weights.layout import Converted, rename, take
from nestling.backbones.weights.swin import BUFFERS

VIT_RULES = [
    (r"conv_proj\.", "patch_embed.proj."),
    (r"class_token$", "cls_token"),
    (r"encoder\.pos_embedding$", "pos_embed"),
    (r"encoder\.ln\.", "norm."),
    (r"encoder\.layers\.encoder_layer_(\d+)\.", r"blocks.\1."),
    (r"(blocks\.\d+)\.ln_(\d)\.", r"\1.norm\2."),
    (r"(blocks\.\d+)\.self_attention\.in_proj_", r"\1.attn.qkv."),
    (r"(blocks\.\d+)\.self_attention\.out_proj\.", r"\1.attn.proj."),
    (r"(blocks\.\d+)\.mlp\.(0|linear_1)\.", r"\1.mlp.fc1."),
    (r"(blocks\.\d+)\.mlp\.(3|linear_2)\.", r"\1.mlp.fc2."),
]

# features.0 is the stem; then a stage and a merging in turn.
SWIN_RULES = [
    (r"features\.0\.0\.", "patch_embed.proj."),
    (r"features\.0\.2\.", "patch_embed.norm."),
    *[(rf"features\.{2 * stage + 1}\.(\d+)\.", rf"layers.{stage}.blocks.\1.") for stage in range(4)],
    *[(rf"features\.{2 * stage + 2}\.", f"layers.{stage}.downsample.") for stage in range(3)],
    (r"(layers\.\d\.blocks\.\d+)\.mlp\.0\.", r"\1.mlp.fc1."),
    (r"(layers\.\d\.blocks\.\d+)\.mlp\.3\.", r"\1.mlp.fc2."),
]


def convert_vit(tensors: dict[str, Tensor]) -> Converted:
    """Our ViT's keys."""
    return Converted("vit", "torchvision ViT", rename(tensors, VIT_RULES))


def convert_swin(tensors: dict[str, Tensor]) -> Converted:
    """Our Swin's keys."""
    tensors = rename(tensors, SWIN_RULES)
    left_out = take(tensors, BUFFERS)
    return Converted("swin", "torchvision Swin", tensors, {"padding": "attended"}, left_out)
