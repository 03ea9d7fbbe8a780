"""DINO, iBOT and DINOv2: the layout whose names our ViT carries.

They differ in little: iBOT calls the mask token `masked_embed`; DINOv2 groups blocks in chunks when it
trains on several GPUs (`blocks.1.13.`), and was trained with its position table of 518 pixels.
"""

from torch import Tensor

from nestling.backbones.weights.layout import Converted, rename, take

# DINO, iBOT and DINOv2 without registers scale the table by (side + 0.1) / side; DINOv2 with
# registers resizes to the exact grid, antialiased.
SCALED = {"interpolate_offset": 0.1, "interpolate_antialias": False}
EXACT = {"interpolate_offset": 0.0, "interpolate_antialias": True}


def convert(tensors: dict[str, Tensor]) -> Converted:
    """Our keys from published ones."""
    layout = layout_of(tensors)
    tensors = rename(tensors, [(r"blocks\.\d+\.(\d+)\.", r"blocks.\1."), (r"masked_embed$", "mask_token")])
    left_out = take(tensors, r".*\.qkv\.bias_mask")
    if "mask_token" in tensors:
        tensors["mask_token"] = tensors["mask_token"].reshape(1, 1, -1)
    notes = []
    if layout == "DINO" and "pos_embed" in tensors:
        notes = [
            "positions are interpolated as DINO trained them; a headless file of timm looks the same: "
            "for one give interpolate_offset=0.0, interpolate_antialias=True"
        ]
    options = EXACT if layout == "DINOv2 with registers" else SCALED
    return Converted("vit", layout, tensors, dict(options), left_out, notes)


def layout_of(tensors: dict[str, Tensor]) -> str:
    """Which of them wrote a file."""
    if "masked_embed" in tensors:
        return "iBOT"
    if "register_tokens" in tensors:
        return "DINOv2 with registers"
    chunked = any(key.split(".")[2].isdigit() for key in tensors if key.startswith("blocks."))
    return "DINOv2" if chunked or "mask_token" in tensors else "DINO"
