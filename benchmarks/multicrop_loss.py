"""The multi-crop loss, forward and backward, from logits that are there.

    python benchmarks/multicrop_loss.py [--threads 1 2] [--quick] [--json FILE] [--device cuda]

32 images, 2 global and 8 local views, 65536 prototypes. The loss alone against the pair loop as in the paper;
the whole term, with its metrics and the center, against lightly's too. In bf16 the logits alone are rounded:
softmax and loss are fp32 on both sides. Extra memory counts the gradients for the logits, on both sides: they
are nearly all of ours, and half of the pair loop's.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from side_by_side import Case, main
from torch import Tensor

from nestling.ssl.terms import Outputs
from nestling.ssl.terms.dino import DinoTerm
from nestling.ssl.terms.pairs import Scratch, multi_crop_loss
from nestling.ssl.terms.targets import Targets

TEMPERATURE, TEACHER_TEMPERATURE = 0.1, 0.04
NUM_GLOBAL, NUM_LOCAL = 2, 8


def pair_loop(student: list[Tensor], targets: list[Tensor]) -> Tensor:
    """DINO's algorithm 1: one pair of views after the other."""
    losses = [
        -(q * F.log_softmax(logits.float() / TEMPERATURE, dim=-1)).sum(dim=-1).mean()
        for t, q in enumerate(targets)
        for v, logits in enumerate(student)
        if v != t
    ]
    return torch.stack(losses).mean()


class Logits:
    """The same random logits as ours takes them, by crop size, and as peers do, by view."""

    def __init__(self, images: int, prototypes: int, dtype: torch.dtype, device: torch.device) -> None:
        torch.manual_seed(0)
        self.images, self.prototypes = images, prototypes
        drawn = torch.randn(NUM_GLOBAL + NUM_LOCAL, images, prototypes, device=device).to(dtype)
        sizes = drawn.split([NUM_GLOBAL, NUM_LOCAL])
        self.by_size = [views.flatten(0, 1).clone().requires_grad_() for views in sizes]
        self.by_view = [view.clone().requires_grad_() for view in drawn]
        self.teacher = torch.randn(NUM_GLOBAL, images, prototypes, device=device).to(dtype)
        self.center = torch.zeros(prototypes, device=device)

    def forget(self) -> None:
        """Let go of all gradients."""
        for logits in (*self.by_size, *self.by_view):
            logits.grad = None

    def ours(self) -> Tensor:
        """The loss alone."""
        self.forget()
        scratch = Scratch()
        targets = Targets(self.center, TEACHER_TEMPERATURE, scratch)
        views = [logits.unflatten(0, (-1, self.images)) for logits in self.by_size]
        loss = multi_crop_loss(
            views, lambda images: targets(self.teacher[:, images]), NUM_GLOBAL, TEMPERATURE, scratch
        )
        loss.backward()
        return loss

    def term(self) -> Tensor:
        """What training computes of logits: metrics and the teacher's mean too."""
        self.forget()
        term = DinoTerm(self.prototypes, TEMPERATURE).to(self.center.device)
        teacher = Outputs([], [self.teacher.flatten(0, 1)], self.images)
        loss, _ = term(Outputs([], self.by_size, self.images), teacher, TEACHER_TEMPERATURE)
        loss.backward()
        term.update()
        return loss

    def looped(self) -> Tensor:
        """The paper's pairs."""
        self.forget()
        targets = ((self.teacher.float() - self.center) / TEACHER_TEMPERATURE).softmax(dim=-1)
        loss = pair_loop(self.by_view, list(targets))
        loss.backward()
        return loss

    def lightlys(self) -> Tensor:
        """lightly's loss, its center moved with it."""
        from lightly.loss import DINOLoss

        self.forget()
        loss = DINOLoss(self.prototypes, student_temp=TEMPERATURE).to(self.center.device)
        value: Tensor = loss(list(self.teacher), self.by_view, teacher_temp=TEACHER_TEMPERATURE)
        value.backward()
        return value

    def alone(self, way: Callable[[], Tensor]) -> None:
        """One of the ways, nothing left of it: what it leaves would be let go of in the peer's call."""
        way()
        self.forget()

    def check(self, ours: Callable[[], Tensor], theirs: Callable[[], Tensor]) -> None:
        """Whether both give the same loss and the same gradients."""
        loss = ours()
        found = torch.cat([logits.grad for logits in self.by_size if logits.grad is not None])
        expected = theirs()
        wanted = torch.cat([logits.grad for logits in self.by_view if logits.grad is not None])
        most = 1e-5 if found.dtype == torch.float32 else 1e-2  # half precision rounds each gradient
        agree("losses", loss, expected, 1e-5)
        agree("gradients", found, wanted, most)
        self.forget()


def agree(what: str, ours: Tensor, theirs: Tensor, most: float) -> None:
    """Raise where two tensors are apart by more than a share of their norm."""
    ours, theirs = ours.detach().float(), theirs.detach().float()
    apart = float((ours - theirs).norm() / theirs.norm())
    if not apart <= most:
        raise ValueError(f"ours and theirs differ: {what} are {apart:.2g} of their norm apart, over {most:g}")


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Loss alone and whole term, in fp32 and bf16."""
    images, prototypes = (4, 2048) if quick else (32, 65536)
    size = f"{images} x {NUM_GLOBAL + NUM_LOCAL} x {prototypes}"
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        logits = Logits(images, prototypes, dtype, device)
        rows = [
            (f"loss, {size}, {name}", "pair loop, as in the paper", logits.ours, logits.looped),
            (f"whole term, {size}, {name}", "pair loop, as in the paper", logits.term, logits.looped),
        ]
        if dtype == torch.float32:  # lightly's center is fp32 and its loss then mixes types
            rows.append((f"whole term, {size}, {name}", "lightly DINOLoss", logits.term, logits.lightlys))
        for part, peer, ours, theirs in rows:
            yield Case(
                part,
                peer,
                partial(logits.alone, ours),
                partial(logits.alone, theirs),
                partial(logits.check, ours, theirs),
                at_least=3.0,
                most_memory=0.30,
                rounds=2 if quick else 9,
            )


if __name__ == "__main__":
    main(cases, __doc__)
