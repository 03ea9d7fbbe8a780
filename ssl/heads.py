"""The projection head of DINO (Caron et al., 2021, appendix C).

Shapes used below: B vectors, D backbone width, E bottleneck width, K prototypes.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.backbones.gelu import Gelu
from nestling.backbones.linear import Linear


class PrototypeLayer(nn.Module):
    """A weight-normed linear layer without bias: row k of the weight is g_k * v_k / |v_k|.

    The two tensors are plain entries `weight_g` (K, 1) and `weight_v` (K, E), the keys of
    published DINO heads. torch's own `weight_norm` either can't be deep-copied (old) or renames
    the keys and can't be pickled (parametrized), so the product is written out.

    With `unit_norm` the gain is a buffer of ones: no gradient, decay or averaging can move it.

    Shape:
        x: (B, E) -> (B, K)
    """

    weight_g: Tensor

    def __init__(self, in_dim: int, num_prototypes: int, unit_norm: bool = True) -> None:
        super().__init__()
        self.weight_v = nn.Parameter(torch.empty(num_prototypes, in_dim))
        nn.init.uniform_(self.weight_v, -(in_dim**-0.5), in_dim**-0.5)
        gain = torch.ones(num_prototypes, 1)
        if unit_norm:
            self.register_buffer("weight_g", gain)
        else:
            self.weight_g = nn.Parameter(gain)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight_g * F.normalize(self.weight_v, dim=1))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        parametrized = {
            "parametrizations.weight.original0": "weight_g",
            "parametrizations.weight.original1": "weight_v",
        }
        for theirs, ours in parametrized.items():
            if prefix + theirs in state_dict:
                state_dict[prefix + ours] = state_dict.pop(prefix + theirs)
        super()._load_from_state_dict(state_dict, prefix, *args)


class ProjectionHead(nn.Module):
    """MLP with GELU, L2 normalisation, then the prototypes: logits are cosines where the gain is 1.

    Shape:
        x: (B, D) -> (B, K)
    """

    def __init__(
        self,
        in_dim: int,
        num_prototypes: int,
        hidden_dim: int = 2048,
        bottleneck_dim: int = 256,
        num_layers: int = 3,
        batch_norm: bool = False,
        norm_last_layer: bool = True,
    ) -> None:
        super().__init__()
        widths = [in_dim] + [hidden_dim] * (num_layers - 1) + [bottleneck_dim]
        layers: list[nn.Module] = []
        for i in range(num_layers):
            layers.append(Linear(widths[i], widths[i + 1]))
            if i < num_layers - 1:
                if batch_norm:
                    layers.append(nn.BatchNorm1d(hidden_dim))
                layers.append(Gelu())
        self.mlp = nn.Sequential(*layers)
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)
        self.last_layer = PrototypeLayer(bottleneck_dim, num_prototypes, unit_norm=norm_last_layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.last_layer(self.bottleneck(x))

    def bottleneck(self, x: Tensor) -> Tensor:
        """What the last layer compares with its prototypes. Shape: (B, D) -> (B, E)."""
        return F.normalize(self.mlp(x), dim=-1)


class DeferredLogits(Sequence[Tensor]):
    """Logits, per crop size, of bottleneck vectors: computed when first read, as they would have been.

    A loss that is fused with the last layer takes `vectors` and `layer` instead and never has all logits.
    `dtype` is that of autocast here, None without it; without gradients here there are none later. The
    weights are those of the moment of reading.

    Shape:
        vectors: (B, E), the rows of all crop sizes
    """

    def __init__(self, vectors: Tensor, layer: PrototypeLayer, sizes: list[int]) -> None:
        self.vectors, self.layer, self._sizes = vectors, layer, sizes
        self.learns, device = torch.is_grad_enabled(), vectors.device.type
        self.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    @cached_property
    def _logits(self) -> tuple[Tensor, ...]:
        autocast = torch.autocast(self.vectors.device.type, self.dtype, enabled=self.dtype is not None)
        with autocast, torch.set_grad_enabled(self.learns and torch.is_grad_enabled()):
            logits: Tensor = self.layer(self.vectors)
        return logits.split(self._sizes)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Tensor, ...]: ...
    def __getitem__(self, index: int | slice) -> Tensor | tuple[Tensor, ...]:
        return self._logits[index]

    def __len__(self) -> int:
        return len(self._sizes)
