"""XCiT's published files, supervised or by DINO: the names our XCiT carries."""

from torch import Tensor

from nestling.backbones.weights.layout import Converted

NANO_WIDTH = 128  # of the only published network whose class attention was trained without `tokens_norm`


def convert(tensors: dict[str, Tensor]) -> Converted:
    """The keys stay as they are."""
    return Converted("xcit", "XCiT", dict(tensors), tokens_norm(tensors))


def tokens_norm(tensors: dict[str, Tensor]) -> dict[str, bool]:
    """The setting that no tensor shows, by the width."""
    return {"tokens_norm": tensors["cls_token"].shape[-1] != NANO_WIDTH}
