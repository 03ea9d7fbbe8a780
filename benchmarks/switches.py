"""What can be switched on, beside the same step without it: activation checkpointing and channels-last.

    python benchmarks/switches.py [--threads 1 2] [--quick] [--json FILE] [--device cuda]

"Ours" is with, the peer without. Checkpointing computes each block's forward twice to keep less, so its ratio
of time is below 1 and its share of the memory is what it is for. Channels-last lays images and convolutions
out as (B, H, W, C); it is compared on what becomes tokens, forward and backward, as XCiT's convolutions and
the patches of ViT and Swin.
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial

import torch
from side_by_side import Case, main
from torch import Tensor, nn

from nestling import backbones

TOLERANCE = 1e-3  # of the largest number in a parameter's gradient
CHECKPOINTED = {"xcit_small_12_p16": 0.5, "vit_small_p16": 0.5, "swin_tiny_w7": 0.6}  # most memory
QUICK = {
    "xcit_small_12_p16": {"depth": 2},
    "vit_small_p16": {"depth": 2},
    "swin_tiny_w7": {"embed_dim": 32, "num_heads": 1},
}


def step(vectors_of: Callable[[Tensor], Tensor], network: nn.Module, images: Tensor) -> Tensor:
    """The loss, after its gradients were taken; these are held before, and so are no extra memory."""
    network.zero_grad(set_to_none=False)
    vectors = vectors_of(images)
    weights = torch.linspace(-1, 1, vectors.shape[-1], dtype=vectors.dtype, device=images.device)
    loss = (vectors @ weights).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def gradients(network: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}


def compare(ours: tuple[Tensor, dict[str, Tensor]], theirs: tuple[Tensor, dict[str, Tensor]]) -> None:
    """Raises AssertionError where a loss or a gradient differs."""
    torch.testing.assert_close(ours[0], theirs[0], rtol=TOLERANCE, atol=0, msg="the losses differ")
    assert ours[1].keys() == theirs[1].keys()
    for name, found in ours[1].items():
        apart = (found - theirs[1][name]).abs().max()
        assert apart <= TOLERANCE * theirs[1][name].abs().max(), f"the gradients of {name} differ"


def checkpointing(name: str, images: Tensor, quick: bool) -> Case:
    """The same network does both, so the weights are held once."""
    torch.manual_seed(0)
    network = backbones.create(name, **(QUICK[name] if quick else {})).to(images.device).train()

    def call(on: bool) -> Tensor:
        network.activation_checkpointing = on
        return step(lambda images: network(images).cls, network, images)

    def check() -> None:
        compare((call(True), gradients(network)), (call(False), gradients(network)))

    part = f"activation checkpointing, {name}, {len(images)} x {images.shape[-1]} px"
    most = None if quick else CHECKPOINTED[name]
    rounds = 1 if quick else 2 if images.device.type == "cpu" else 15
    return Case(part, "without", lambda: call(True), lambda: call(False), check, None, most, rounds)


def channels_last(name: str, images: Tensor, quick: bool) -> Case:
    """Two copies of what makes patches, from pixels to tokens, checked in float64."""
    torch.manual_seed(0)
    without = backbones.create(name).get_submodule("patch_embed").to(images.device).train()
    within = copy.deepcopy(without).to(memory_format=torch.channels_last)
    laid_out = images.contiguous(memory_format=torch.channels_last)

    def ours() -> Tensor:
        return step(partial(tokens, within), within, laid_out)

    def theirs() -> Tensor:
        return step(partial(tokens, without), without, images)

    def check() -> None:
        found = []
        for module, pixels in ((within, laid_out), (without, images)):
            exact = copy.deepcopy(module).double()
            loss = step(partial(tokens, exact), exact, pixels.double())
            found.append((loss, gradients(exact)))
        compare(*found)

    part = f"channels-last, patches of {name}, {len(images)} x {images.shape[-1]} px"
    return Case(part, "contiguous", ours, theirs, check, rounds=1 if quick else 15)


def tokens(module: nn.Module, images: Tensor) -> Tensor:
    """Through a GELU, as a batch norm alone passes no gradient of its output's squares. Shape: (B, N, C)."""
    found = module(images)
    is_map = found.shape[-1] == found.shape[-2]
    return nn.functional.gelu(found.flatten(2).mT if is_map else found.flatten(1, 2))


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Checkpointing of each family, then channels-last of each; on CPUs XCiT's stem always works so."""
    batch, large, small = (8 if device.type == "cpu" else 64), 224, 96
    if quick:
        batch, large, small = 2, 64, 32  # of one image torch's batch norm on CPUs gives other gradients
    for name in CHECKPOINTED:
        yield checkpointing(name, torch.randn(batch, 3, large, large, device=device), quick)
    for name in CHECKPOINTED:
        if device.type == "cpu" and name.startswith("xcit"):
            continue
        for number, side in ((batch, large), (4 * batch, small)):
            yield channels_last(name, torch.randn(number, 3, side, side, device=device), quick)


if __name__ == "__main__":
    main(cases, __doc__)
