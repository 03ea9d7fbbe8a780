"""A training step of a backbone (forward, backward) and its forward pass, against timm with the same weights.

    python benchmarks/backbones.py [--threads 1 2] [--quick] [--json FILE] [--device cuda]

Both networks return an image-level vector per crop, whose fixed linear function is the loss. Drop path is
off. On a CPU both find freed memory again, as in training. One that can't multiply bf16 emulates it, some
twenty times slower than fp32: there bf16 runs on two small crops.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import timm
import torch
from side_by_side import Case, main
from timm.models.xcit import checkpoint_filter_fn
from torch import Tensor, nn

from nestling import backbones
from nestling.backbones import Backbone
from nestling.ssl import allocator
from nestling.ssl.run.processes import multiplies_bf16

MULTI_CROP, GLOBAL, LOCAL = {224: 2, 96: 8}, {224: 2}, {64: 2}  # side: views of an image
FLOORS = {  # (network, whether bf16) -> ratio asked for
    ("xcit_small_12_p16", False): 1.1,
    ("xcit_small_12_p16", True): 1.25,
    ("vit_small_p16", False): 1.15,
    ("vit_small_p16", True): 1.0,
}


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Training steps at full and at half precision, then the forward pass alone."""
    if device.type == "cpu":
        allocator.keep_freed()
    batch = 16 if device.type == "cuda" else 1
    rounds = 1 if quick else 5
    for name in ("xcit_small_12_p16", "xcit_tiny_12_p16", "vit_small_p16"):
        twins = Twins.of(name, device, depth=1 if quick else 12)
        crops = [LOCAL] if quick else [MULTI_CROP, GLOBAL]
        for sides in crops:
            yield training_case(
                twins, views_of(sides, batch, device), False, FLOORS.get((name, False)), rounds
            )
        yield forward_case(twins, views_of(LOCAL if quick else GLOBAL, batch, device), rounds)
        if (name, True) in FLOORS:  # last: bf16 leaves running statistics that differ a little
            sides = MULTI_CROP if multiplies_bf16() and not quick else LOCAL
            yield training_case(twins, views_of(sides, batch, device), True, FLOORS[name, True], rounds)


@dataclass(frozen=True)
class Twins:
    """One network in both implementations, in training mode, and a direction to take the loss along."""

    ours: Backbone
    theirs: nn.Module
    direction: Tensor

    @classmethod
    def of(cls, name: str, device: torch.device, depth: int) -> "Twins":
        """Ours with random weights, and timm's holding the same."""
        torch.manual_seed(0)
        if name.startswith("xcit"):
            ours = backbones.create(name, depth=depth)
            theirs = timm.create_model(f"{name}_224", num_classes=0, depth=depth)
        else:
            ours = backbones.create(name, depth=depth, interpolate_antialias=True)  # as timm reads positions
            theirs = timm.create_model(
                "vit_small_patch16_224", num_classes=0, depth=depth, dynamic_img_size=True
            )
        theirs.load_state_dict(as_timm(dict(ours.state_dict()), theirs), strict=True)
        direction = torch.randn(ours.embed_dim)
        return cls(ours.to(device).train(), theirs.to(device).train(), direction.to(device))

    def step(self, network: nn.Module, views: list[Tensor], half: bool) -> Tensor:
        """Vectors of all views; the gradients are left in the parameters."""
        network.train().zero_grad()
        vectors = vectors_of(network, views, half)
        (vectors.float() @ self.direction).sum().backward()
        return vectors.detach()

    def gradients(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What the last steps left, by timm's names: ours and theirs."""
        ours, theirs = (
            {
                name: parameter.grad
                for name, parameter in network.named_parameters()
                if parameter.grad is not None
            }
            for network in (self.ours, self.theirs)
        )
        return as_timm(ours, self.theirs), theirs


def as_timm(entries: dict[str, Tensor], theirs: nn.Module) -> dict[str, Tensor]:
    """Weights or gradients by timm's names; a ViT has them already."""
    is_xcit = type(theirs).__name__ == "Xcit"
    return checkpoint_filter_fn(entries, theirs) if is_xcit else entries


def vectors_of(network: nn.Module, views: list[Tensor], half: bool) -> Tensor:
    """Image-level vectors of all views: the peer has one forward pass per size."""
    with torch.autocast(views[0].device.type, torch.bfloat16, enabled=half):
        if isinstance(network, Backbone):
            return torch.cat(network.view_vectors(views))
        return torch.cat([network(images) for images in views])


def views_of(sides: dict[int, int], batch: int, device: torch.device) -> list[Tensor]:
    """Per size one batch of crops."""
    return [torch.randn(batch * count, 3, side, side, device=device) for side, count in sides.items()]


def title(twins: Twins, views: list[Tensor], what: str) -> str:
    """A row's name."""
    crops = " + ".join(f"{len(images)}x{images.shape[-1]}" for images in views)
    return f"{twins.ours.name} {what}, {crops}"


def training_case(twins: Twins, views: list[Tensor], half: bool, at_least: float | None, rounds: int) -> Case:
    """Forward and backward over all crop sizes."""

    def check() -> None:
        ours, theirs = (twins.step(network, views, half) for network in (twins.ours, twins.theirs))
        compare({"the vectors": ours}, {"the vectors": theirs}, 0.05 if half else 1e-4)
        compare(*twins.gradients(), 0.3 if half else 1e-3)  # emulated bf16 rounds sums, where we add in fp32

    return Case(
        part=title(twins, views, f"step {'bf16' if half else 'fp32'}"),
        peer="timm, same weights",
        ours=lambda: twins.step(twins.ours, views, half),
        theirs=lambda: twins.step(twins.theirs, views, half),
        check=check,
        at_least=at_least,
        rounds=rounds,
    )


def forward_case(twins: Twins, views: list[Tensor], rounds: int) -> Case:
    """As an evaluation reads images: no gradient, running statistics."""

    def evaluated(network: nn.Module) -> Tensor:
        network.eval()
        with torch.no_grad():
            return vectors_of(network, views, half=False)

    def check() -> None:
        ours, theirs = evaluated(twins.ours), evaluated(twins.theirs)
        compare({"the vectors": ours}, {"the vectors": theirs}, 1e-4)

    return Case(
        part=title(twins, views, "forward fp32"),
        peer="timm, same weights",
        ours=lambda: evaluated(twins.ours),
        theirs=lambda: evaluated(twins.theirs),
        check=check,
        rounds=rounds,
    )


def compare(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    """Raises ValueError for a tensor that differs by more than a share of its largest entry.

    What is a thousand times smaller than the largest of all is rounding: a key's bias has no gradient.
    """
    if found.keys() != wanted.keys():
        raise ValueError(f"timm has {sorted(wanted)}, ours {sorted(found)}")
    largest = max(tensor.abs().max().item() for tensor in wanted.values())
    for name, tensor in wanted.items():
        difference = (found[name].float() - tensor.float()).abs().max().item()
        scale = max(tensor.abs().max().item(), 1e-3 * largest)
        if not difference <= tolerance * scale:
            raise ValueError(
                f"{name} differs from timm's by {difference / scale:.1e}, more than {tolerance:g}"
            )


if __name__ == "__main__":
    main(cases, __doc__)
