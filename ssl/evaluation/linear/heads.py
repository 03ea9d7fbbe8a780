"""Many linear heads as few weights: those that read one vector are one matrix product.

Shapes used below: B images, H heads of all read-outs, h of one read-out, C classes, D channels of it.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nestling.ssl.randomness import Stream, generator

FIRST_WEIGHTS = 3  # of Stream.PROBE
SPREAD = 0.01  # of the first weights, as in DINO and DINOv2


class HeadSpec(NamedTuple):
    """What tells a head from the others: its read-out and its learning rate (`lr`) or penalty (`c`)."""

    readout: str
    setting: str
    value: float

    def __str__(self) -> str:
        return f"{self.readout} {self.setting}={self.value:g}"


class HeadGrid:
    """Heads side by side; the gradient of one never reaches another, not even as NaN.

    Shape:
        weights: {readout: (h, C, D)}, biases: {readout: (h, C)}, in the order of the specs of that read-out
    """

    def __init__(
        self, specs: Iterable[HeadSpec], weights: Mapping[str, Tensor], biases: Mapping[str, Tensor]
    ) -> None:
        listed = list(specs)
        self.specs = [spec for name in weights for spec in listed if spec.readout == name]
        assert len(self.specs) == len(listed) == sum(map(len, weights.values())), "one weight for each spec"
        self.weights, self.biases = dict(weights), dict(biases)

    @property
    def parameters(self) -> list[Tensor]:
        """Weight and bias of each read-out in turn."""
        return [tensors[name] for name in self.weights for tensors in (self.weights, self.biases)]

    @property
    def num_classes(self) -> int:
        return next(iter(self.biases.values())).shape[1]

    def logits(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """Shape: {readout: (B, D)} -> (B, H, C), heads in the order of `specs`."""
        parts = []
        for name, weight in self.weights.items():
            rows = vectors[name].to(weight.device, weight.dtype)
            flat = F.linear(rows, weight.flatten(0, 1), self.biases[name].flatten())  # B (h C)
            parts.append(flat.unflatten(1, weight.shape[:2]))
        return torch.cat(parts, dim=1)

    def finite(self) -> Tensor:
        """Which heads have no NaN and no infinity in them.

        Shape:
            -> (H,) bool, on the CPU
        """
        whole = [
            weight.isfinite().flatten(1).all(1) & self.biases[name].isfinite().all(1)
            for name, weight in self.weights.items()
        ]
        return torch.cat(whole).cpu()

    def one(self, spec: HeadSpec) -> tuple[Tensor, Tensor]:
        """Shape: -> weight (C, D), bias (C,), on the CPU."""
        place = [each for each in self.specs if each.readout == spec.readout].index(spec)
        return tuple(  # type: ignore[return-value]
            tensors[spec.readout][place].detach().cpu().clone() for tensors in (self.weights, self.biases)
        )


def first_heads(
    specs: Sequence[HeadSpec],
    widths: Mapping[str, int],
    num_classes: int,
    seed: int,
    device: torch.device | str,
) -> HeadGrid:
    """Untrained heads: weights normal with deviation 0.01, biases 0.

    Those of one read-out start alike and differ by what they learn with. What they start from depends on
    the seed and the read-out alone, so a head learns the same in any grid.
    """
    weights, biases = {}, {}
    for name in dict.fromkeys(spec.readout for spec in specs):
        count = sum(spec.readout == name for spec in specs)
        random = generator(seed, Stream.PROBE, FIRST_WEIGHTS, zlib.crc32(name.encode()))
        start = torch.from_numpy(SPREAD * random.standard_normal((num_classes, widths[name]))).float()
        weights[name] = start.to(device).repeat(count, 1, 1)
        biases[name] = torch.zeros(count, num_classes, device=device)
    return HeadGrid(specs, weights, biases)
