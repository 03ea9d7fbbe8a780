"""A training step of Swin-T, beside timm's and torchvision's with the same weights.

    python benchmarks/swin.py [--threads 1 2] [--quick] [--json FILE] [--device cuda]

A step is forward and backward; on a CPU both find freed memory again, as in training. On crops of 96 pixels
grids are padded to whole windows: torchvision computes what `padding="attended"` does at every size, timm,
which shifts before it pads, something else. So timm is compared at 224 pixels alone. A CPU without units for
bf16 emulates it, some twenty times slower than fp32: there bf16 runs on one small crop.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from side_by_side import Case, main
from torch import Tensor, nn

from nestling import backbones
from nestling.ssl import allocator
from nestling.ssl.run.processes import multiplies_bf16

TOLERANCE = 2e-3  # of the largest number in a parameter's gradient; sums in fp32 end in another order
QUICK = {"embed_dim": 32, "depth": 2, "num_heads": 1}


def twin_of_timm(ours: nn.Module, dim: int, depth: int, heads: int) -> tuple[nn.Module, Callable[[str], str]]:
    """timm's network and its names of our parameters: it counts mergings to the stage after them."""
    from timm.models.swin_transformer import SwinTransformer, checkpoint_filter_fn

    depths, num_heads = (2, 2, depth, 2), tuple(heads << stage for stage in range(4))
    theirs = SwinTransformer(
        embed_dim=dim, depths=depths, num_heads=num_heads, num_classes=0, drop_path_rate=0.0
    )
    theirs.load_state_dict(checkpoint_filter_fn(dict(ours.state_dict()), theirs))
    return theirs, lambda key: re.sub(
        r"(\d)\.downsample", lambda found: f"{int(found[1]) + 1}.downsample", key
    )


def twin_of_torchvision(
    ours: nn.Module, dim: int, depth: int, heads: int
) -> tuple[nn.Module, Callable[[str], str]]:
    """torchvision's network without its classifier, and its names of our parameters."""
    from torchvision.models import SwinTransformer

    depths, num_heads = [2, 2, depth, 2], [heads << stage for stage in range(4)]
    theirs = SwinTransformer([4, 4], dim, depths, num_heads, [7, 7], stochastic_depth_prob=0.0)
    theirs.head = nn.Identity()
    state = {name_in_torchvision(key): tensor for key, tensor in ours.state_dict().items()}
    left = theirs.load_state_dict(state, strict=False)
    assert not left.unexpected_keys
    assert all("relative_position_index" in key for key in left.missing_keys)
    return theirs, name_in_torchvision


def name_in_torchvision(key: str) -> str:
    """It numbers patch embedding, stages and mergings in one list."""
    first, *rest = key.split(".")
    if first == "patch_embed":
        return f"features.0.{'0' if rest[0] == 'proj' else '2'}.{rest[1]}"
    if first != "layers":
        return key
    number, part = 2 * int(rest[0]), ".".join(rest[2:])
    if rest[1] == "downsample":
        return f"features.{number + 2}.{part}"
    return f"features.{number + 1}.{part.replace('mlp.fc1', 'mlp.0').replace('mlp.fc2', 'mlp.3')}"


def step(
    vectors_of: Callable[[list[Tensor]], list[Tensor]], network: nn.Module, views: list[Tensor], half: bool
) -> Tensor:
    """The loss, of a projection of each image's vector, after its gradients were taken."""
    network.zero_grad()
    device = views[0].device
    with torch.autocast(device.type, torch.bfloat16) if half else nullcontext():
        vectors = torch.cat(vectors_of(views))
    weights = torch.linspace(-1, 1, vectors.shape[1], device=device)
    loss = (vectors.float() @ weights).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def compare(
    ours: nn.Module, theirs: nn.Module, losses: tuple[Tensor, Tensor], named: Callable[[str], str]
) -> None:
    """Raises AssertionError where a loss or a gradient differs."""
    torch.testing.assert_close(losses[0], losses[1], rtol=TOLERANCE, atol=0, msg="the losses differ")
    gradients = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    for key, parameter in ours.named_parameters():
        found, expected = parameter.grad, gradients[named(key)]
        assert found is not None, key
        assert expected is not None, key
        apart = (found - expected).abs().max() / expected.abs().max()
        assert apart < TOLERANCE, f"the gradients of {key} differ by {apart:.1e} of the largest"


def case(
    part: str, peer: str, padding: str, views: list[Tensor], quick: bool, half: bool, rounds: int
) -> Case:
    """The check is in fp32, where rounding hides nothing."""
    torch.manual_seed(0)
    options = QUICK if quick else {"embed_dim": 96, "depth": 6, "num_heads": 3}
    network = backbones.create("swin_tiny_w7", padding=padding, **options)
    twin_of = {"timm": twin_of_timm, "torchvision": twin_of_torchvision}[peer]
    twin, named = twin_of(network, *options.values())
    network, twin = network.to(views[0].device).train(), twin.to(views[0].device).train()

    def ours(half: bool = half) -> Tensor:
        return step(network.view_vectors, network, views, half)

    def theirs(half: bool = half) -> Tensor:
        return step(lambda views: [twin(view) for view in views], twin, views, half)

    def check() -> None:
        compare(network, twin, (ours(False), theirs(False)), named)

    return Case(part, peer, ours, theirs, check, at_least=1.1, rounds=rounds)


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Images of 224 pixels alone, those of multi-crop, and bf16."""
    if device.type == "cpu":
        allocator.keep_freed()
    on_cpu, rounds = device.type == "cpu", 1 if quick else 5
    batch = 1 if quick else 4 if on_cpu else 64

    def views(number: int, side: int) -> Tensor:
        return torch.randn(number, 3, side, side, device=device)

    for peer in ("timm", "torchvision"):
        yield case("Swin-T step, 224 px", peer, "masked", [views(batch, 224)], quick, False, rounds)
    crops = [views(max(1, batch // 2), 224), views(2 * batch, 96)]
    yield case("Swin-T step, 2 x 224 + 8 x 96 px", "torchvision", "attended", crops, quick, False, rounds)
    is_small = quick or not multiplies_bf16()
    part = f"Swin-T step, bf16, {'96 px' if is_small else '2 x 224 + 8 x 96 px'}"
    crops = [views(1, 96)] if is_small else crops
    yield case(part, "torchvision", "attended", crops, quick, True, rounds)


if __name__ == "__main__":
    main(cases, __doc__)
