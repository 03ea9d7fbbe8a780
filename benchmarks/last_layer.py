"""The weight-normed last layer and the multi-crop loss as one, forward and backward, from bottleneck vectors.

    python benchmarks/last_layer.py [--threads 1 2] [--quick] [--json FILE] [--device cuda]

32 images, 2 global and 8 local views, 256 wide, 65536 prototypes. Peers go through all logits: our own layer,
then the loss written out for autograd; torch's weight norm, then the pair loop as in the paper; lightly's
last layer view by view, as its examples call it, then its loss. A CPU without units for bf16 takes minutes
for one product of the peers: there the bf16 cases are small, ours computes in fp32, and the ratio tells that.
"""

import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from multicrop_loss import NUM_GLOBAL, NUM_LOCAL, TEACHER_TEMPERATURE, TEMPERATURE, agree, pair_loop
from side_by_side import Case, main
from torch import Tensor, nn

from nestling.ssl.distributed import cpu_multiplies_bf16
from nestling.ssl.heads import DeferredLogits, PrototypeLayer
from nestling.ssl.terms import Outputs
from nestling.ssl.terms.dino import DinoTerm

WIDTH = 256


class Vectors:
    """Bottleneck vectors of all views, a student's and a teacher's last layer in three makes."""

    def __init__(self, images: int, prototypes: int, dtype: torch.dtype, device: torch.device) -> None:
        torch.manual_seed(0)
        self.images, self.dtype, self.device = images, dtype, device
        rows = torch.randn(NUM_GLOBAL + NUM_LOCAL, images, WIDTH, device=device)
        self.student = F.normalize(rows, dim=-1).flatten(0, 1).requires_grad_()
        self.teacher = F.normalize(torch.randn(NUM_GLOBAL * images, WIDTH, device=device), dim=-1)
        layers = [PrototypeLayer(WIDTH, prototypes).to(device) for _ in range(2)]
        self.own, self.torchs, self.lightlys = ([make(layer) for layer in layers] for make in MAKES)
        for _, teacher in (self.own, self.torchs, self.lightlys):
            teacher.requires_grad_(False)
        self.term = DinoTerm(prototypes, TEMPERATURE).to(device)
        self.center = torch.zeros(prototypes, device=device)

    def logits(self, layers: list[nn.Module]) -> tuple[Tensor, Tensor]:
        """All of them, of the student and the teacher."""
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            with torch.no_grad():
                teacher = layers[1](self.teacher)
            return layers[0](self.student), teacher

    def targets(self, teacher: Tensor) -> Tensor:
        """Of each teacher's view."""
        q = ((teacher.float() - self.center) / TEACHER_TEMPERATURE).softmax(dim=-1)
        return q.unflatten(0, (NUM_GLOBAL, -1))

    def fused(self) -> Tensor:
        """Ours, as training has it by default."""
        sizes = [NUM_GLOBAL * self.images, NUM_LOCAL * self.images]
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            student = DeferredLogits(self.student, self.own[0], sizes)
            teacher = DeferredLogits(self.teacher, self.own[1], sizes[:1])
        outputs = (Outputs([], student, self.images), Outputs([], teacher, self.images))
        loss, _ = self.term(*outputs, TEACHER_TEMPERATURE)
        self.term.discard()
        return loss

    def written_out(self) -> Tensor:
        """Our layer, and per view one log-sum-exp and one product with the sum of its targets."""
        student, teacher = self.logits(self.own)
        q = self.targets(teacher)
        losses = []
        for v, logits in enumerate(student.split(self.images)):
            seen = q[1 - v] if v < NUM_GLOBAL else q.sum(dim=0)
            scores = logits.float() / TEMPERATURE
            count = NUM_GLOBAL - 1 if v < NUM_GLOBAL else NUM_GLOBAL
            losses.append((count * scores.logsumexp(dim=-1) - (seen * scores).sum(dim=-1)).mean())
        return torch.stack(losses).sum() / (NUM_GLOBAL * (len(losses) - 1))

    def looped(self) -> Tensor:
        """torch's weight norm, and the paper's pairs."""
        student, teacher = self.logits(self.torchs)
        return pair_loop(list(student.split(self.images)), list(self.targets(teacher)))

    def by_view(self) -> Tensor:
        """lightly's, one view after the other."""
        from lightly.loss import DINOLoss

        student = [self.lightlys[0](view) for view in self.student.split(self.images)]
        with torch.no_grad():
            teacher = [self.lightlys[1](view) for view in self.teacher.split(self.images)]
        loss = DINOLoss(len(self.center), student_temp=TEMPERATURE).to(self.device)
        value: Tensor = loss(teacher, student, teacher_temp=TEACHER_TEMPERATURE)
        return value

    def learn(self, way: Callable[[], Tensor], layers: list[nn.Module]) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, and its gradients for vectors and weight."""
        (weight,) = [parameter for parameter in layers[0].parameters() if parameter.requires_grad]
        self.student.grad = weight.grad = None
        loss = way()
        loss.backward()
        assert self.student.grad is not None
        assert weight.grad is not None
        return loss.detach(), self.student.grad, weight.grad

    def check(self, way: Callable[[], Tensor], layers: list[nn.Module]) -> None:
        """Whether a peer gives our loss and gradients; those of half precision by how it rounds."""
        names, most = ("losses", "gradients of vectors", "gradients of weights"), 1e-4
        if self.dtype != torch.float32:
            most = 3e-2
        for name, ours, theirs in zip(
            names, self.learn(self.fused, self.own), self.learn(way, layers), strict=True
        ):
            agree(name, ours, theirs, most)


def ours(layer: PrototypeLayer) -> nn.Module:
    """The layer itself."""
    return layer


def torchs(layer: PrototypeLayer) -> nn.Module:
    """torch's, parametrized, with the same weight and a gain that doesn't learn."""
    made = nn.utils.parametrizations.weight_norm(
        nn.Linear(WIDTH, len(layer.weight_v), bias=False, device=layer.weight_v.device)
    )
    theirs = {"original0": layer.weight_g, "original1": layer.weight_v.detach()}
    made.load_state_dict({f"parametrizations.weight.{name}": tensor for name, tensor in theirs.items()})
    gain, _ = made.parameters()
    gain.requires_grad_(False)
    return made


def lightlys(layer: PrototypeLayer) -> nn.Module:
    """That of lightly's head, with the same weight."""
    from lightly.models.modules import DINOProjectionHead

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it uses torch's first weight norm
        made: nn.Module = DINOProjectionHead(1, 1, WIDTH, len(layer.weight_v)).last_layer
    made.load_state_dict(layer.state_dict())
    return made.to(layer.weight_v.device)


MAKES: tuple[Callable[[PrototypeLayer], nn.Module], ...] = (ours, torchs, lightlys)


def cases(device: torch.device, quick: bool) -> Iterator[Case]:
    """Each peer in fp32, those that take it in bf16."""
    for dtype, name, at_least in ((torch.float32, "fp32", 1.6), (torch.bfloat16, "bf16", 1.4)):
        is_slow = dtype == torch.bfloat16 and device.type == "cpu" and not cpu_multiplies_bf16()
        images, prototypes = (4, 2048) if quick or is_slow else (32, 65536)
        vectors = Vectors(images, prototypes, dtype, device)
        peers = [
            ("own layer, then log-sum-exp", vectors.written_out, vectors.own),
            ("torch weight_norm, then pair loop", vectors.looped, vectors.torchs),
            ("lightly by view, then DINOLoss", vectors.by_view, vectors.lightlys),
        ]
        if is_slow:  # both sides computing in bf16 would take minutes, so the two aren't alike
            name, at_least = "bf16, ours in fp32", None
        part = f"layer + loss, {images} x 10 x {prototypes}, {name}"
        for peer, way, layers in peers[: 3 if dtype == torch.float32 else 2]:
            yield Case(
                part,
                peer,
                partial(vectors.learn, vectors.fused, vectors.own),
                partial(vectors.learn, way, layers),
                partial(vectors.check, way, layers),
                at_least,
                rounds=2 if quick else 7,
            )


if __name__ == "__main__":
    main(cases, __doc__)
