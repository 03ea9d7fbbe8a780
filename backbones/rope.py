"""Rotary positions (RoPE, Su et al., 2021) over both axes of an image, as in DINOv3 (Simeoni et al., 2025).

Shapes used below: h x w grid of N patches, P tokens before them, D channels a head.
"""

import math

import torch
from torch import Tensor, nn

from nestling.backbones.options import check_not_negative, check_positive


class AxialRope(nn.Module):
    """Angles by which queries and keys are turned: a function of the grid, without parameters.

    A patch's centre has coordinates y, x in [-1, 1], each axis by its own length, whatever the grid.
    Of the D / 2 planes of a head, plane i of the first half turns by 2 pi y / base^(4i / D), plane i of
    the second by the same of x. In training, coordinates are shifted by up to `shift` and multiplied
    by a log-uniform factor between 1 / jitter and jitter, both per axis, then by one between
    1 / rescale and rescale, shared; drawn anew at each call. Raises ValueError for a range that is none.

    Shape:
        grid (h, w) -> (2, P + N, D / 2): cosines, then sines; the P first tokens are not turned
    """

    def __init__(
        self, name: str, head_dim: int, base: float, shift: float, jitter: float, rescale: float
    ) -> None:
        super().__init__()
        check_positive(name, rope_base=base)
        check_not_negative(name, rope_shift=shift)
        for option, value in (("rope_jitter", jitter), ("rope_rescale", rescale)):
            if not value >= 1:
                raise ValueError(f"{option} of {name} must be 1 (off) or more, not {value}")
        self.head_dim, self.base = head_dim, base
        self.shift, self.jitter, self.rescale = shift, jitter, rescale

    def forward(self, grid: tuple[int, int], prefix: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The table of a grid, in fp32 at least; `prefix` tokens before the patches are not turned."""
        dtype = torch.promote_types(dtype, torch.float32)
        y, x = (2 * ((torch.arange(n, device=device, dtype=dtype) + 0.5) / n) - 1 for n in grid)
        if self.training:
            y, x = self._augment(y, x)
        plane = torch.arange(self.head_dim // 4, device=device, dtype=dtype)
        turns = 2 * math.pi / self.base ** (4 * plane / self.head_dim)
        angles_y = (y[:, None] * turns)[:, None].expand(-1, grid[1], -1)  # h w D/4
        angles_x = (x[:, None] * turns)[None].expand(grid[0], -1, -1)
        angles = torch.cat([angles_y, angles_x], dim=-1).flatten(0, 1)  # N D/2
        angles = torch.cat([angles.new_zeros(prefix, self.head_dim // 2), angles])
        return torch.stack([angles.cos(), angles.sin()])

    def _augment(self, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.shift:
            shift_y, shift_x = y.new_empty(2).uniform_(-self.shift, self.shift)
            y, x = y + shift_y, x + shift_x
        if self.jitter != 1:
            bound = math.log(self.jitter)
            jitter_y, jitter_x = y.new_empty(2).uniform_(-bound, bound).exp()
            y, x = y * jitter_y, x * jitter_x
        if self.rescale != 1:
            bound = math.log(self.rescale)
            factor = y.new_empty(1).uniform_(-bound, bound).exp()
            y, x = y * factor, x * factor
        return y, x

    def extra_repr(self) -> str:
        return f"base={self.base}, shift={self.shift}, jitter={self.jitter}, rescale={self.rescale}"


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Turn each plane (channel i, channel i + D / 2) by its angle.

    Shape:
        x: (..., P + N, D), rope: (2, P + N, D / 2) -> (..., P + N, D)
    """
    cos, sin = rope.to(x.dtype).unbind()
    a, b = x.chunk(2, dim=-1)
    return torch.cat([torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)], dim=-1)
