"""What every backbone takes and returns.

Shapes used below: B images, C input channels, D features, N = h * w patches of an h x w grid.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nestling.backbones.checkpointing import checkpointed


class Features(NamedTuple):
    """One image as one vector, and as one vector per patch.

    Shape:
        cls: (B, D), the image-level vector
        patches: (B, N, D), normalised patch tokens, row-major over the grid
        grid: (h, w)
    """

    cls: Tensor
    patches: Tensor
    grid: tuple[int, int]


class Backbone(nn.Module, ABC):
    """The contract of all families.

    `name` is the registered name, `embed_dim` the width D of what is returned, `stride` the pixels
    per patch along a side, `min_size` the smallest height and width. `has_attention` says whether there
    is a class token whose attention can be shown. With `activation_checkpointing`
    the activations inside a block are computed again in the backward pass instead of being kept.
    """

    name: str
    embed_dim: int
    stride: int
    min_size: int
    has_attention: bool = True
    activation_checkpointing: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """A class with a `forward` of its own doesn't inherit the short ways of another one's."""
        super().__init_subclass__(**kwargs)
        if "forward" in vars(cls) and "image_vectors" not in vars(cls):
            cls.image_vectors = Backbone.image_vectors  # type: ignore[method-assign]
        if "image_vectors" in vars(cls) and "view_vectors" not in vars(cls):
            cls.view_vectors = Backbone.view_vectors  # type: ignore[method-assign]

    @abstractmethod
    def forward(self, images: Tensor, mask: Tensor | None = None) -> Features:
        """Features of a batch; masked patches are replaced by the mask token before the first block.

        Shape:
            images: (B, C, H, W)
            mask: (B, h, w), bool, true where masked
        """

    def image_vectors(self, images: Tensor) -> Tensor:
        """`forward(images).cls`, without what only the patches need where the family can leave it out.

        Shape:
            images: (B, C, H, W) -> (B, D)
        """
        return self(images).cls

    def view_vectors(self, views: Sequence[Tensor]) -> list[Tensor]:
        """`image_vectors` of several crop sizes, in less time where the family can take them together.

        Shape:
            views: V of (B, C, H, W) -> V of (B, D)
        """
        return [self.image_vectors(images) for images in views]

    @abstractmethod
    def pyramid(self, images: Tensor) -> list[Tensor]:
        """Feature maps for detectors and segmentation heads, at strides 4, 8, 16 and 32.

        Shape:
            images: (B, C, H, W) -> four of (B, D_i, ceil(H / s_i), ceil(W / s_i))
        """

    @abstractmethod
    def attention(self, images: Tensor) -> Tensor:
        """How much the class token attends to each patch in the last layer, per head.

        Raises ValueError where `has_attention` is false: a family without a class token.

        Shape:
            images: (B, C, H, W) -> (B, heads, h, w)
        """

    def last_blocks(self, images: Tensor, count: int) -> list[Features]:
        """What each of the last `count` blocks puts out, normalised; the last one is `forward(images)`.

        As linear probes read them (DINO, appendix F.2). Blocks of another stage have their own width, and a
        block before the class token comes in has the mean of its patches as `cls`. Raises ValueError where
        the network has fewer blocks; an adapted one shows its last alone.

        Shape:
            images: (B, C, H, W) -> `count` of Features, the last block's last
        """
        check_count(self.name, count, 1)
        return [self(images)]

    def check_size(self, height: int, width: int) -> None:
        """Raises ValueError for a size that the family can't take, naming the nearest that it can."""
        if height < self.min_size or width < self.min_size:
            nearest = f"{max(height, self.min_size)} x {max(width, self.min_size)}"
            raise ValueError(
                f"{self.name} takes images from {self.min_size} x {self.min_size} pixels up, "
                f"not {height} x {width} (height x width); the nearest size that works is {nearest}"
            )

    def no_weight_decay(self) -> set[str]:
        """Names of parameters to spare besides those with at most one dimension (biases, norms)."""
        return set()

    def run(self, block: nn.Module, *inputs: Any) -> Any:
        """One block of the network, checkpointed where asked for."""
        if self.activation_checkpointing and torch.is_grad_enabled():
            return checkpointed(block, *inputs)
        return block(*inputs)


def check_count(name: str, count: int, available: int) -> None:
    """Raises ValueError for a number of last blocks that the network doesn't have."""
    if not 1 <= count <= available:
        shown = "its last block alone" if available == 1 else f"its last 1 to {available} blocks"
        raise ValueError(f"{name} shows {shown}, not {count}")


def apply_mask(
    tokens: Tensor, mask: Tensor, grid: tuple[int, int], mask_token: Tensor | None, name: str
) -> Tensor:
    """Masked patches become the mask token.

    Raises ValueError where the network has none, or for a mask of another type or shape.

    Shape:
        tokens: (B, N, D), mask: (B, h, w), bool, mask_token: (1, 1, D) -> (B, N, D)
    """
    if mask_token is None:
        raise ValueError(f"{name} was built without a mask token; build it with mask_token=True")
    if mask.shape != (tokens.shape[0], *grid) or mask.dtype != torch.bool:
        found = f"{mask.dtype} of shape {tuple(mask.shape)}"
        raise ValueError(f"the mask must be torch.bool of shape {(tokens.shape[0], *grid)}, not {found}")
    return torch.where(mask.flatten(1)[..., None], mask_token.to(tokens.dtype), tokens)
