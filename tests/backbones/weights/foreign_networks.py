"""What the tests of layouts share: other libraries' networks with random weights, and images."""

import torch
from torch import Tensor, nn


def stirred(model: nn.Module, seed: int = 0) -> nn.Module:
    """In evaluation mode, every weight and statistic moved off its initial value."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point() and tensor.min() > -50:  # no mask of -100
                tensor += 0.1 * torch.rand(tensor.shape, generator=generator).to(tensor.dtype)
    return model.eval()


def images(height: int = 224, width: int | None = None, channels: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1, channels, height, width or height, generator=generator).double()


def largest(difference: Tensor) -> float:
    return difference.abs().max().item()
