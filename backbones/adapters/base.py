"""What all adapters share: `self.model` is the foreign network, and its figures come from dry forwards."""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from nestling.backbones.adapters.blocks import blocks_of, checkpointing
from nestling.backbones.adapters.probing import SIDES, Probe, check_features, near_sizes, stride_of
from nestling.backbones.features import Backbone, Features

Result = TypeVar("Result")

# What the contract spares from weight decay, by the names that other libraries give it.
SPARED = (
    *("*cls_token", "*class_token", "*dist_token", "*reg_token", "*register_tokens", "*mask_token"),
    *("*pos_embed", "*pos_embed_win", "*pos_embedding", "*position_embedding"),
    *("*relative_position_bias_table", "*attention_biases", "*rel_pos_h", "*rel_pos_w"),
    *("*temperature", "*logit_scale", "*gamma", "*gamma[_0-9]*", "*layer_scale", "*layer_scale_?"),
)


class Adapter(Backbone):
    """A foreign network behind the contract; a subclass says how its outputs become `Features`.

    Activation checkpointing works at the blocks that the network repeats. Parameters that no output
    depends on are frozen: without a gradient they would stall training on several processes.
    """

    model: Any  # its attributes are another library's
    _is_checkpointed = False

    def __init__(self, name: str, model: nn.Module, in_chans: int) -> None:
        super().__init__()
        self.name, self.model, self.in_chans = name, model, in_chans

    def measure(self, *sizes: tuple[int, int]) -> None:
        """Sets embed_dim, stride and min_size, from images of the first size that the network takes.

        Raises ValueError where it takes none, or breaks the contract.
        """
        self.reference = next((size for size in sizes if self._can_start_at(size)), sizes[0])
        height, width = self.reference
        found = check_features(self._probe().explained("features", height, width), self.name)
        self.embed_dim, self.stride = found.cls.shape[-1], stride_of(height, found.grid[0])
        probe = self._probe()
        smaller = (side for side in SIDES if side < min(self.reference) and probe.takes(side, side))
        side = next(smaller, None)
        self.min_size = side or min(self.reference)
        for unused in self._probe().unused(*((side, side) if side else self.reference)):
            self.get_parameter(unused).requires_grad_(False)

    @property
    def activation_checkpointing(self) -> bool:
        """Raises ValueError when it is switched on for a network that repeats no block."""
        return self._is_checkpointed

    @activation_checkpointing.setter
    def activation_checkpointing(self, enable: bool) -> None:
        if enable:
            self._blocks()
        self._is_checkpointed = enable

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Features:
        if mask is not None:
            raise ValueError(f"{self.name} has no mask token, so it takes no mask")
        return self.guarded(self.features, images)

    @abstractmethod
    def features(self, images: Tensor) -> Features:
        """What the foreign network makes of images. Shape: images (B, C, H, W) -> Features."""

    def attention(self, images: Tensor) -> Tensor:
        """Raises ValueError, but in subclasses that can read it."""
        raise ValueError(f"{self.name} has no class-token attention that can be read")

    def guarded(self, function: Callable[[Tensor], Result], images: Tensor) -> Result:
        """`function(images)`, checkpointed where asked for; a size that is refused is named as such."""
        if torch.compiler.is_compiling():
            return function(images)
        try:
            if self.activation_checkpointing and torch.is_grad_enabled():
                with checkpointing(self._blocks()):
                    return function(images)
            return function(images)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a foreign network may raise anything
            self.check_size(*images.shape[-2:])
            raise

    def check_size(self, height: int, width: int) -> None:
        """Raises ValueError for a size at which a dry forward fails, naming the nearest found to work."""
        probe = self._probe()
        if probe.takes(height, width):
            return
        near = near_sizes(height, width, {self.min_size, self.stride})
        rows, columns = next((size for size in near if probe.takes(*size)), self.reference)
        raise ValueError(
            f"{self.name} takes no images of {height} x {width} pixels (height x width); "
            f"the nearest size found to work is {rows} x {columns}"
        )

    def no_weight_decay(self) -> set[str]:
        """What the network itself names (by pattern, in timm), and tokens, positions and scales."""
        own: Callable[[], Iterable[str]] = getattr(self.model, "no_weight_decay", tuple)
        patterns = (*SPARED, *(f"model.{pattern}" for pattern in own()))
        names = [name for name, _ in self.named_parameters()]
        return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}

    def _can_start_at(self, size: tuple[int, int]) -> bool:
        """Also settles whether to probe on the meta device: not where an operation has no shape rule."""
        self.probed_on_meta = True
        if not self._probe().takes(*size):
            self.probed_on_meta = False
        return self.probed_on_meta or self._probe().takes(*size)

    def _probe(self) -> Probe:
        return Probe(self, self.in_chans, self.probed_on_meta)

    def _blocks(self) -> list[nn.Module]:
        blocks = blocks_of(self.model)
        if not blocks:
            raise ValueError(f"{self.name} repeats no block, so activation_checkpointing must be off")
        return blocks
