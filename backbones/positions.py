"""Position encodings that are functions of the grid alone, so that any size works.

Shapes used below: h x w grid of N patches, C channels, F = 32 sinusoids per axis.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def sinusoids(length: int, num: int, device: torch.device, temperature: float = 10000.0) -> Tensor:
    """Sines and cosines of a position along one axis, scaled to (0, 2 pi] whatever the length.

    Column 2i holds sin(p / temperature^(2i / num)), column 2i + 1 its cosine. Always fp32: in bf16
    neighbouring positions of a long axis would coincide.

    Shape:
        returns (length, num)
    """
    position = torch.arange(1, length + 1, device=device, dtype=torch.float32)
    position = position / (position[-1:] + 1e-6) * (2 * math.pi)
    pair = torch.arange(num // 2, device=device, dtype=torch.float32)
    angle = position[:, None] / temperature ** (2 * pair / num)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)


class FourierPositions(nn.Module):
    """Sinusoids of both coordinates through a 1x1 projection (XCiT, section 3.3; DETR).

    The projection is linear and one half of its input depends on the row alone, the other on the
    column alone: h + w projections give all h * w of them. Nothing is cached, so that copies, pickles
    and compiled graphs hold no state but the projection.

    Shape:
        grid (h, w) -> (N, C)
    """

    def __init__(self, dim: int, num_sinusoids: int = 32) -> None:
        super().__init__()
        self.num_sinusoids = num_sinusoids
        self.token_projection = nn.Conv2d(2 * num_sinusoids, dim, kernel_size=1)  # the published name

    def forward(self, grid: tuple[int, int]) -> Tensor:
        weight, bias = self.token_projection.weight, self.token_projection.bias
        rows, columns = (sinusoids(side, self.num_sinusoids, weight.device).to(weight.dtype) for side in grid)
        weight_rows, weight_columns = weight.flatten(1).chunk(2, dim=1)  # each C F
        device_type = "cpu" if weight.is_meta else weight.device.type  # autocast knows no meta device
        with torch.autocast(device_type, enabled=False):  # for h + w rows full precision costs nothing
            rows, columns = F.linear(rows, weight_rows), F.linear(columns, weight_columns, bias)
        return (rows[:, None] + columns[None]).flatten(0, 1)


def sincos2d(grid: tuple[int, int], dim: int, device: torch.device, temperature: float = 10000.0) -> Tensor:
    """The fixed positions of MAE and MoCo v3: a quarter of the channels each for a sine and a cosine an axis.

    In MAE's order: sin(x w), cos(x w), sin(y w), cos(y w), where x is the column and y the row, counted
    in patches from 0 whatever the grid, and w_i = temperature^(-i / (C / 4)). Always fp32.

    Shape:
        returns (N, C)
    """
    quarter = dim // 4
    band = temperature ** (-torch.arange(quarter, device=device, dtype=torch.float32) / quarter)
    rows, columns = (
        torch.arange(length, device=device, dtype=torch.float32)[:, None] * band for length in grid
    )
    rows, columns = (torch.cat([angle.sin(), angle.cos()], dim=-1) for angle in (rows, columns))
    rows, columns = rows[:, None].expand(-1, grid[1], -1), columns[None].expand(grid[0], -1, -1)  # h w C/2
    return torch.cat([columns, rows], dim=-1).flatten(0, 1)
