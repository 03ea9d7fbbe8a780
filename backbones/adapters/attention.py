"""The class token's attention, read from a foreign network's last fused attention call.

Shapes used below: B images, H heads, P prefix tokens (the class token first), N = h * w patches.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _LastCall(TorchFunctionMode):
    """Remembers the arguments of the last `scaled_dot_product_attention`."""

    query: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self._remember(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _remember(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        self.query, self.key, self.bias, self.scale = query, key, attn_mask, scale


def class_attention(
    function: Callable[[Tensor], Any], images: Tensor, num_prefix: int, grid: tuple[int, int]
) -> Tensor | None:
    """How the class token attends to the patches in the last attention of `function(images)`.

    None where that attention is not one over P prefix tokens and N patches.

    Shape:
        images: (B, C, height, width) -> (B, H, h, w)
    """
    with _LastCall() as last:
        function(images)
    tokens = num_prefix + grid[0] * grid[1]
    if last.query is None or last.query.shape[-2] not in (1, tokens) or last.key.shape[-2] != tokens:
        return None
    query = last.query[..., :1, :]  # the class token's
    scale = 1 / math.sqrt(query.shape[-1]) if last.scale is None else last.scale
    logits = query @ last.key.mT * scale
    if last.bias is not None:
        logits = logits + last.bias[..., :1, :]
    return torch.softmax(logits, -1).squeeze(-2)[..., num_prefix:].unflatten(-1, grid)
