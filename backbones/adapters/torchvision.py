"""`torchvision:NAME`: every classification network of torchvision, its classifier taken off.

Shapes used below: B images, D features, N = h * w patches of an h x w grid.
"""

from collections.abc import Iterator
from difflib import get_close_matches
from functools import partial
from itertools import takewhile
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.backbones.adapters.base import Adapter
from nestling.backbones.adapters.construction import build_here, failure, refuse_options
from nestling.backbones.adapters.levels import levels_of
from nestling.backbones.adapters.probing import stride_of
from nestling.backbones.features import Features
from nestling.backbones.options import check_drop_path, check_positive

# Where the trunk ends: the first of these among a network's children.
_ENDS = ("avgpool", "classifier", "fc")
_CLASSIFIERS = ("fc", "head", "heads", "classifier")
_OURS = {
    "weights": "they are never fetched; load them from a file",
    "pretrained": "weights are never fetched; load them from a file",
    "num_classes": "the classifier is always left out",
    "stochastic_depth_prob": "the contract's own option is drop_path",
}


class Torchvision(Adapter):
    """`cls` is what the classifier sees: the mean cell, normalised where the network does so.

    Patches are the last map's cells, normalised alike. A network with a class token gives that.
    Options go to torchvision; the first convolution is built for `in_chans`. Raises ValueError for a
    name or an option that torchvision doesn't know.

    Shape:
        images: (B, in_chans, H, W) -> Features
    """

    def __init__(
        self, name: str, inner: str, in_chans: int = 3, drop_path: float = 0.0, **options: Any
    ) -> None:
        check_positive(name, in_chans=in_chans)
        check_drop_path(name, drop_path)
        model = _build(name, inner, options)
        super().__init__(name, model, in_chans)
        _set_channels(model, in_chans)
        _set_drop_path(name, model, drop_path)
        self.has_attention = hasattr(model, "class_token")
        self.channels_last = hasattr(model, "permute")  # Swin's maps, until its last step
        _take_classifier_off(model)
        side = getattr(model, "image_size", None) or 224
        self.strides: list[int] = []
        self.measure((side, side))
        maps = self._probe().call("maps", side, side)
        self.strides = [stride_of(side, x.shape[2]) for x in maps]

    def features(self, images: Tensor) -> Features:
        """Of ViT its tokens, else the last map. Shape: images (B, C, H, W) -> Features."""
        if self.has_attention:
            tokens = self.model.encoder.ln(self.model.encoder.layers(self._embedded(images)))
            rows, columns = (side // self.model.patch_size for side in images.shape[-2:])
            return Features(tokens[:, 0], tokens[:, 1:], (rows, columns))
        x = self._trunk_outputs(images)[-1]
        patches = x.flatten(2).mT  # B N D
        return Features(
            self._normalised(patches.mean(1)), self._normalised(patches), (x.shape[2], x.shape[3])
        )

    def attention(self, images: Tensor) -> Tensor:
        """The last encoder block's; ValueError in networks without a class token.

        Shape:
            images: (B, C, H, W) -> (B, heads, h, w)
        """
        if not self.has_attention:
            return super().attention(images)
        return self.guarded(self._class_attention, images)

    def pyramid(self, images: Tensor) -> list[Tensor]:
        """The trunk's last map at each stride; of a ViT, maps along its depth.

        Shape:
            images: (B, C, H, W) -> four of (B, D_i, ceil(H / s), ceil(W / s)), s = 4, 8, 16, 32
        """
        maps = self.guarded(self.maps, images)
        return levels_of(maps, self.strides, *images.shape[-2:])

    def maps(self, images: Tensor) -> list[Tensor]:
        """Shape: images (B, C, H, W) -> the maps along the network, each (B, D_i, h_i, w_i)."""
        if not self.has_attention:
            return self._trunk_outputs(images)
        grid = [side // self.model.patch_size for side in images.shape[-2:]]
        x = self._embedded(images)
        outputs = []
        for block in self.model.encoder.layers:
            x = block(x)
            outputs.append(x[:, 1:].mT.unflatten(2, grid))
        return outputs

    def _trunk_outputs(self, images: Tensor) -> list[Tensor]:
        outputs = []
        x = images
        for layer in _trunk(self.model):
            x = layer(x)
            outputs.append(x)
        if self.channels_last:  # the norm and the permutation at the end are one output
            outputs = [y.permute(0, 3, 1, 2) for y in outputs[:-2]] + outputs[-1:]
        if type(self.model).__name__ == "DenseNet":  # its last activation is in no module
            outputs[-1] = F.relu(outputs[-1])
        return outputs

    def _embedded(self, images: Tensor) -> Tensor:
        """Shape: images (B, C, H, W) -> (B, 1 + N, D), class token first, with positions."""
        patches = self.model._process_input(images)
        cls = self.model.class_token.expand(len(images), -1, -1)
        return self.model.encoder.dropout(torch.cat([cls, patches], 1) + self.model.encoder.pos_embedding)

    def _class_attention(self, images: Tensor) -> Tensor:
        x = self._embedded(images)
        *blocks, last = self.model.encoder.layers
        for block in blocks:
            x = block(x)
        x = last.ln_1(x)
        _, weights = last.self_attention(x, x, x, need_weights=True, average_attn_weights=False)
        rows, columns = (side // self.model.patch_size for side in images.shape[-2:])
        return weights[:, :, 0, 1:].unflatten(-1, (rows, columns))

    def _normalised(self, x: Tensor) -> Tensor:
        """Shape: (..., D) -> (..., D)."""
        layers: Any = getattr(self.model, "classifier", ())
        for layer in layers:
            if isinstance(layer, nn.LayerNorm):  # also of the kind that is for maps
                x = F.layer_norm(x, layer.normalized_shape, layer.weight, layer.bias, layer.eps)
        return x


def _build(name: str, inner: str, options: dict[str, Any]) -> nn.Module:
    models = _import(name)
    refuse_options(name, options, _OURS)
    known = models.list_models(module=models)
    if inner not in known:
        close = get_close_matches(inner, known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(known)}"
        raise ValueError(f"torchvision has no classification model {inner!r}; {hint}")
    if inner in ("googlenet", "inception_v3"):  # no classifiers in the midst; their usual initialisation
        options = {"aux_logits": False, "init_weights": True, **options}
    try:
        return build_here(partial(models.get_model, inner, weights=None, **options))
    except Exception as error:  # a foreign constructor may raise anything
        raise ValueError(failure(name, error)) from error


def _import(name: str) -> ModuleType:
    try:
        from torchvision import models
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
        raise ValueError(
            f"{name} needs torchvision, which is not installed: pip install torchvision"
        ) from None
    return models


def _trunk(model: nn.Module) -> Iterator[nn.Module]:
    """The layers up to the pooling, in order; lists are looked into."""
    for name, child in model.named_children():
        if name in _ENDS:
            return
        yield from child if isinstance(child, nn.Sequential | nn.ModuleList) else (child,)


def _take_classifier_off(model: nn.Module) -> None:
    """All from the first layer that is learned for classes; a norm before it stays, under its key."""
    for name in _CLASSIFIERS:
        classifier = getattr(model, name, None)
        if classifier is None:
            continue
        layers = list(classifier) if isinstance(classifier, nn.Sequential) else [classifier]
        kept = takewhile(lambda layer: not isinstance(layer, nn.Linear | nn.Conv2d | nn.Dropout), layers)
        setattr(model, name, nn.Sequential(*kept))


def _set_channels(model: nn.Module, in_chans: int) -> None:
    """Another first convolution, its weights drawn with the spread of the one it replaces."""
    name, old = next((name, m) for name, m in model.named_modules() if isinstance(m, nn.Conv2d))
    if old.in_channels == in_chans:
        return
    new = nn.Conv2d(
        in_chans,
        old.out_channels,
        old.kernel_size,  # type: ignore[arg-type]
        old.stride,  # type: ignore[arg-type]
        old.padding,  # type: ignore[arg-type]
        bias=old.bias is not None,
    )
    with torch.no_grad():
        new.weight.normal_().mul_(old.weight.std())
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, new)


def _set_drop_path(name: str, model: nn.Module, drop_path: float) -> None:
    """The last block's rate; those before it keep their share of it."""
    from torchvision.ops import StochasticDepth

    layers = [layer for layer in model.modules() if isinstance(layer, StochasticDepth)]
    highest = max((layer.p for layer in layers), default=0.0)
    if not highest and drop_path:
        raise ValueError(f"{name} has no drop path, so drop_path must be 0, not {drop_path}")
    for layer in layers:
        layer.p *= drop_path / highest
