"""`timm:NAME`: every timm network that ends in one map of patches.

Shapes used below: B images, D features, P prefix tokens (class, distillation, registers), N = h * w patches.
"""

from difflib import get_close_matches
from functools import partial
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from nestling.backbones.adapters.attention import class_attention
from nestling.backbones.adapters.base import Adapter
from nestling.backbones.adapters.construction import build_here, failure, refuse_options, refused_option
from nestling.backbones.adapters.levels import levels_of
from nestling.backbones.adapters.probing import ContractError, describe, grid_of
from nestling.backbones.features import Features
from nestling.backbones.options import check_drop_path, check_positive

_OURS = {
    "pretrained": "weights are never fetched; load them from a file",
    "checkpoint_path": "weights are loaded from a file by load()",
    "pretrained_cfg": "weights are never fetched; load them from a file",
    "pretrained_cfg_overlay": "weights are never fetched; load them from a file",
    "cache_dir": "nothing is fetched",
    "num_classes": "the classifier is always left out",
    "features_only": "the maps are what pyramid() gives",
    "drop_path_rate": "the contract's own option is drop_path",
}


class Timm(Adapter):
    """`cls` is timm's own pooled vector, patches are the last map's cells, normalised as the vector is.

    Where timm's head makes the vector wider than the map, `cls` is the mean patch instead. Options go
    to timm and override our defaults, which free a network from one image size where it can be freed.
    Raises ValueError for a name or an option that timm doesn't know.

    Shape:
        images: (B, in_chans, H, W) -> Features
    """

    def __init__(
        self, name: str, inner: str, in_chans: int = 3, drop_path: float = 0.0, **options: Any
    ) -> None:
        check_positive(name, in_chans=in_chans)
        check_drop_path(name, drop_path)
        super().__init__(name, _build(name, inner, in_chans, drop_path, options), in_chans)
        self.num_prefix_tokens = _num_prefix_tokens(self.model)
        self.measure(_native_size(self.model, options))
        self.has_attention = self._probe().call("class_attention", *self.reference) is not None

    def features(self, images: Tensor) -> Features:
        found = self.model.forward_features(images)
        patches, grid = self._patches(found, images)
        cls = self.model.forward_head(found, pre_logits=True)
        if cls.shape != (patches.shape[0], patches.shape[-1]):
            cls = patches.mean(1)
        return Features(cls, patches, grid)

    def attention(self, images: Tensor) -> Tensor:
        """The last block's, whatever follows it; ValueError where that has no class token.

        Shape:
            images: (B, C, H, W) -> (B, heads, h, w)
        """
        maps = self.guarded(self.class_attention, images)
        return super().attention(images) if maps is None else maps

    def class_attention(self, images: Tensor) -> Tensor | None:
        """Shape: images (B, C, H, W) -> (B, heads, h, w)."""
        if getattr(self.model, "cls_token", None) is None or not self.num_prefix_tokens:
            return None
        grid = self.features(images).grid
        return class_attention(self.model.forward_features, images, self.num_prefix_tokens, grid)

    def pyramid(self, images: Tensor) -> list[Tensor]:
        """timm's intermediate maps.

        Shape:
            images: (B, C, H, W) -> four of (B, D_i, ceil(H / s), ceil(W / s)), s = 4, 8, 16, 32
        """
        return self.guarded(self._pyramid, images)

    def _pyramid(self, images: Tensor) -> list[Tensor]:
        maps = self.model.forward_intermediates(images, output_fmt="NCHW", intermediates_only=True)
        strides = [info["reduction"] for info in self.model.feature_info]
        return levels_of(maps, strides, *images.shape[-2:])

    def _patches(self, found: Any, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Shape: (B, P + N, D), (B, D, h, w) or (B, h, w, D) -> (B, N, D)."""
        if not isinstance(found, Tensor) or found.ndim not in (3, 4):
            raise ContractError(
                f"{self.name} ends in {describe(found)}, not in one map of patches, so it can't be adapted"
            )
        found = self._normalised(found)
        if found.ndim == 3:
            patches = found[:, self.num_prefix_tokens :]
            height, width = images.shape[-2:]
            reduction = self.model.feature_info[-1]["reduction"]
            return patches, grid_of(patches.shape[1], height, width, reduction, self.name)
        if getattr(self.model, "output_fmt", None) == "NHWC":
            return found.flatten(1, 2), (found.shape[1], found.shape[2])
        return found.flatten(2).mT, (found.shape[2], found.shape[3])

    def _normalised(self, found: Tensor) -> Tensor:
        """Where timm moved the last norm behind the pooling, the patches get it too."""
        head = getattr(self.model, "head", None)
        norms: list[Any] = [getattr(self.model, "fc_norm", None), getattr(head, "norm", None)]
        for norm in norms:
            weight = getattr(norm, "weight", None)
            if weight is not None and len(weight) == self.model.num_features:  # else of a wider vector
                return norm(found)
        return found


def _build(name: str, inner: str, in_chans: int, drop_path: float, options: dict[str, Any]) -> nn.Module:
    """The network without its classifier, free from one image size where its family can be."""
    timm = _import(name)
    refuse_options(name, options, _OURS)
    if not inner or ":" in inner or not timm.is_model(inner):
        close = get_close_matches(inner, timm.list_models(), n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ValueError(f"timm {timm.__version__} has no model {inner!r}{hint}")
    ours: dict[str, Any] = {"in_chans": in_chans, "drop_path_rate": drop_path, "dynamic_img_size": True}
    while True:
        try:
            given = {**ours, **options}
            return build_here(partial(timm.create_model, inner, pretrained=False, num_classes=0, **given))
        except Exception as error:  # a foreign constructor may raise anything
            refused = refused_option(error)
            if refused in options or refused not in ours:
                raise ValueError(failure(name, error)) from error
            _do_without(name, refused, ours)


def _do_without(name: str, option: str, ours: dict[str, Any]) -> None:
    """The network doesn't know one of our options: fine, unless it was to change something."""
    value = ours.pop(option)
    if option == "dynamic_img_size":
        ours["strict_img_size"] = False  # Swin's word for it; other families need none
    elif option == "drop_path_rate" and value > 0:
        raise ValueError(f"{name} has no drop path, so drop_path must be 0, not {value}") from None
    elif option == "in_chans" and value != 3:
        raise ValueError(f"{name} takes images of 3 channels only, not in_chans={value}") from None


def _import(name: str) -> ModuleType:
    try:
        import timm
    except ModuleNotFoundError as error:
        if error.name != "timm":
            raise
        raise ValueError(f"{name} needs timm, which is not installed: pip install 'nestling[timm]'") from None
    return timm


def _native_size(model: Any, options: dict[str, Any]) -> tuple[int, int]:
    """The size that the network was made for."""
    size = options.get("img_size") or model.pretrained_cfg["input_size"][1:]
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def _num_prefix_tokens(model: nn.Module) -> int:
    number = getattr(model, "num_prefix_tokens", None)
    return int(getattr(model, "global_pool", None) == "token") if number is None else number
