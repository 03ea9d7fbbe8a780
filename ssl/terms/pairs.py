"""The multi-crop cross-entropy and its gradient at once, a few images at a time.

On a CPU a pass over a block that fits its cache is several times faster than one over all logits, so each
block is done with before the next one is read; the compiled kernel does the same row by row. The gradient
comes with the loss: the softmax that both need is most of the work, and no log-softmax waits for a backward
pass.

Shapes used below: B images, n of them in a block, V student views of which the first T are global, G views
of one crop size, K prototypes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from nestling.ssl.terms import compiled

CACHED = 2**19  # logits in a block on a CPU: 2 MB of fp32
COMPILED = 2**23  # for the kernel, where a block only saves memory for targets
BOUNDED = 2**24  # elsewhere, where a block only saves memory
FP16_SCALE = 2.0**12  # all slopes for the scores add up to at most twice this, and few are too small


class Scratch:
    """Memory on a CPU that every block uses anew: fresh pages cost more than what is computed in them.

    Copies and pickles are empty.
    """

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def __call__(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """Anything, in the memory of that name; new memory on other devices, whose allocators keep it."""
        if like.device.type != "cpu":
            return like.new_empty(shape)
        count, held = math.prod(shape), self._held.get(name)
        if held is None or held.numel() < count or held.dtype != like.dtype:
            with torch.inference_mode(False):  # else training could not use it after an evaluation
                held = self._held[name] = torch.empty(count, dtype=like.dtype)
        return held[:count].view(shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Scratch":
        return Scratch()

    def __reduce__(self) -> tuple[type["Scratch"], tuple[()]]:
        return Scratch, ()


@dataclass(frozen=True)
class Pairs:
    """Which views are compared, student view v with the teacher's view t for all t != v, over B images."""

    num_views: list[int]  # of each crop size
    num_global: int
    num_images: int

    @property
    def count(self) -> int:
        """Pairs of all images, which the loss is the mean of."""
        return self.num_images * self.num_global * (sum(self.num_views) - 1)

    def groups(self) -> Iterator[tuple[int, slice, int | None]]:
        """A crop size, views of it, and which of the teacher's views they are; None for all local ones."""
        first = 0
        for size, count in enumerate(self.num_views):
            split = min(max(self.num_global - first, 0), count)
            for v in range(split):
                yield size, slice(v, v + 1), first + v
            if split < count:
                yield size, slice(split, count), None
            first += count

    def blocks(self, num_logits: int, num_prototypes: int, within: int | None = None) -> list[slice]:
        """All images, or the first `within`, in even blocks.

        A block has at most `num_logits` logits of all student views, or it is a single image.
        """
        number = self.num_images if within is None else within
        most = max(1, num_logits // (sum(self.num_views) * num_prototypes))
        count = -(-number // most)
        edges = [number * block // count for block in range(count + 1)]
        return [slice(start, end) for start, end in pairwise(edges)]


@dataclass(frozen=True)
class Comparison:
    """`weight` times the sum over pairs and images of -sum_k q_t log p_v (DINO, equation 3).

    With the targets q summing to one, the pairs of view v cost together

        |T_v| logsumexp(x_v) - <sum of q_t over t in T_v, x_v>

    where x = slope * logits are the scores and T_v the global views other than v. The slope for x_v is
    |T_v| softmax(x_v) - sum of q_t. `weight` times it, and times `rescale`, is the gradient.

    Shape:
        slope, rescale: (1,) or (K,)
    """

    pairs: Pairs
    slope: Tensor
    weight: float
    scratch: Scratch
    rescale: Tensor | None = None

    def __call__(
        self, student: Sequence[Tensor], targets: Tensor, gradients: Sequence[Tensor] | None
    ) -> Tensor:
        """The part of a block of images; its gradient is written into `gradients`, which may be `student`.

        Shape:
            student, gradients: per crop size (G, n, K)
            targets: (T, n, K), each row a distribution
        """
        rescale = () if self.rescale is None else (self.rescale,)
        is_taken = compiled.takes(targets, self.slope, *rescale)
        if is_taken and compiled.takes_rows(*student, *(gradients or ())):
            firsts = [0, *accumulate(self.pairs.num_views)]
            groups = [
                (logits, None if gradients is None else gradients[size], firsts[size])
                for size, logits in enumerate(student)
            ]
            return targets.new_tensor(
                compiled.compare(groups, targets, self.slope, self.rescale, self.weight)
            )
        return self._pass_by_pass(student, targets, gradients)

    def _pass_by_pass(
        self, student: Sequence[Tensor], targets: Tensor, gradients: Sequence[Tensor] | None
    ) -> Tensor:
        weight, scratch = self.weight, self.scratch
        weighted = torch.mul(targets, -weight, out=scratch("weighted", targets.shape, targets))
        total = torch.sum(weighted, dim=0, out=scratch("total", targets.shape[1:], targets))
        loss = targets.new_zeros(())
        for size, views, own in self.pairs.groups():
            logits = student[size][views]
            x = scratch("scores", logits.shape, self.slope)
            torch.mul(in_kind_of(x, logits), self.slope, out=x)
            p = torch.softmax(x, dim=-1, out=scratch("softmax", x.shape, x))
            if own is None:
                seen, num_seen = total, len(targets)
                seen_by = torch.sum(x, dim=0, out=scratch("sum", x.shape[1:], x))
            else:
                seen, num_seen, seen_by = sum_of_others(weighted, own), len(targets) - 1, x
            loss += weight * num_seen * log_sum_exp(x, p).sum()
            loss += torch.dot(seen_by.flatten(), seen.flatten())
            if gradients is not None:
                gradient = gradients[size][views]
                found = gradient if gradient.dtype == p.dtype else p
                torch.add(seen, p, alpha=weight * num_seen, out=found)
                if self.rescale is not None:
                    found.mul_(self.rescale)
                if found is p:
                    gradient.copy_(p)
        return loss


def in_kind_of(memory: Tensor, tensor: Tensor) -> Tensor:
    """The tensor, copied into memory of another type where it has another, as torch is slow to mix types."""
    return tensor if tensor.dtype == memory.dtype else memory.copy_(tensor)


def sum_of_others(tensors: Tensor, own: int) -> Tensor:
    """The sum along the first dimension, in which `own` is left out rather than taken off again."""
    if len(tensors) == 2:
        return tensors[1 - own]
    return torch.cat([tensors[:own], tensors[own + 1 :]]).sum(dim=0)


def log_sum_exp(scores: Tensor, p: Tensor) -> Tensor:
    """logsumexp(x) = max x - log max p, without a second exponential. Shape: (..., K) -> (...)."""
    return scores.amax(dim=-1) - p.amax(dim=-1).log()


def block_size(like: Tensor) -> int:
    """How many logits of that kind are worked on at once."""
    if like.device.type != "cpu":
        return BOUNDED
    return COMPILED if compiled.takes_rows(like) else CACHED


def multi_crop_loss(
    student: Sequence[Tensor],
    targets_of: Callable[[slice], Tensor],
    num_global: int,
    temperature: float,
    scratch: Scratch,
) -> Tensor:
    """The mean over pairs and images, given logits; `targets_of` makes the targets (T, n, K) of images.

    Shape:
        student: per crop size (G, B, K), global views first
    """
    like = student[0][0, 0, 0]
    pairs = Pairs([len(views) for views in student], num_global, student[0].shape[1])
    scale = FP16_SCALE if like.dtype == torch.float16 else 1.0
    slope = like.new_full((1,), 1 / temperature, dtype=torch.promote_types(like.dtype, torch.float32))
    compare = Comparison(pairs, slope, scale / (temperature * pairs.count), scratch)
    loss = slope.new_zeros(())
    learns = torch.is_grad_enabled() and any(views.requires_grad for views in student)
    gradients = [compiled.empty_like(views) for views in student] if learns else None
    with torch.no_grad():
        for images in pairs.blocks(block_size(student[0]), student[0].shape[-1]):
            logits = [views[:, images] for views in student]
            slopes = None if gradients is None else [gradient[:, images] for gradient in gradients]
            loss += compare(logits, targets_of(images), slopes)
    loss *= temperature / scale
    return loss if gradients is None else with_gradients(loss, scale, gradients, student)


def with_gradients(
    loss: Tensor, scale: float, gradients: Sequence[Tensor], inputs: Sequence[Tensor]
) -> Tensor:
    """The loss, which passes on `gradients` / scale as its gradients for `inputs`.

    They are used up by a backward pass.

    Raises:
        RuntimeError: at a second backward pass, or at one that is to be differentiated itself.
    """
    result: Tensor = _Known.apply(loss, scale, gradients, *inputs)
    return result


class _Known(torch.autograd.Function):
    """A number whose gradients are known already."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: float, gradients: Sequence[Tensor], *inputs: Tensor) -> Tensor:
        ctx.scale, ctx.gradients = scale, list(gradients)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients times `slope` / scale, in their own memory. Raises as `with_gradients` says."""
        if torch.is_grad_enabled():
            raise RuntimeError("the gradient of this loss has no derivative: leave create_graph=True out")
        if ctx.gradients is None:
            raise RuntimeError("the gradient of this loss was used up by a backward pass: compute it again")
        gradients, ctx.gradients = ctx.gradients, None
        factor = slope / ctx.scale
        if factor.device.type != "cpu" or factor != 1:  # a GPU is not waited for
            for gradient in gradients:
                gradient.mul_(factor)
        return None, None, None, *gradients
