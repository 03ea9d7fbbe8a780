"""Weights in everyone's layout: `load(path)` recognises a file and builds the backbone that it fits.

One file a layout: `own`, `dino` (with iBOT and DINOv2), `xcit`, `swin` (with EsViT), `timm`, `torchvision`,
`huggingface`. timm's and Hugging Face's are written too: `timm.to_timm`, `huggingface.to_huggingface`.
"""

from nestling.backbones.weights.fitting import fit
from nestling.backbones.weights.loading import Loaded, Weights, built, load, read
from nestling.backbones.weights.report import Report

__all__ = ["Loaded", "Report", "Weights", "built", "fit", "load", "read"]
