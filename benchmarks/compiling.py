"""Blocks of XCiT-T12/16 compiled one by one, as by `train.compile=blocks`, against the same as they are.

    python benchmarks/compiling.py [--threads 1 2] [--quick] [--json FILE] [--device cuda]

Four blocks, forward and backward, on the tokens of 16 images of 224 pixels, fp32; on a GPU in bf16 too. What
compiling takes, about a minute on two CPU cores, passes in the check and is not in the figures.
"""

import copy
from collections.abc import Iterator
from functools import partial

import torch
from side_by_side import Case, main
from torch import Tensor, nn

from nestling import backbones

NUM_BLOCKS = 4


def run(blocks: nn.ModuleList, tokens: Tensor, grid: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Forward and backward through all blocks; returns what they put out."""
    blocks.zero_grad()
    x = tokens
    with torch.autocast(tokens.device.type, dtype, enabled=dtype != torch.float32):
        for block in blocks:
            x = block(x, grid)
    x.square().mean().backward()
    return x.detach()


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """One per precision."""
    side, images = (2, 2) if quick else (14, 16)
    small = {"embed_dim": 16, "num_heads": 2} if quick else {}
    torch.manual_seed(0)
    depth = 1 if quick else NUM_BLOCKS
    plain = backbones.create("xcit_tiny_12_p16", depth=depth, **small).blocks.to(device).train()
    compiled = copy.deepcopy(plain)
    for block in compiled:
        block.compile(dynamic=False)
    width = plain[0].norm1.normalized_shape[0]
    tokens = torch.randn(images, side * side, width, device=device, requires_grad=True)
    for dtype in (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,):
        ours, theirs = (partial(run, blocks, tokens, (side, side), dtype) for blocks in (compiled, plain))
        precision = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
        yield Case(
            f"XCiT-T12/16, blocks compiled, {precision}",
            "not compiled",
            *(ours, theirs, partial(check, ours, theirs, dtype)),
            rounds=2 if quick else 9,
        )


def check(ours: partial[Tensor], theirs: partial[Tensor], dtype: torch.dtype) -> None:
    """Raises AssertionError where outputs or gradients differ by more than their precision rounds."""
    atol = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(ours(), theirs(), rtol=0, atol=atol)
    pairs = zip(ours.args[0].parameters(), theirs.args[0].parameters(), strict=True)
    for mine, other in pairs:
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=atol)


if __name__ == "__main__":
    main(cases, __doc__)
