"""The last layer and the multi-crop loss as one: the logits of all views never exist together.

Image by image block: the logits by one product, loss and gradient in their place, and from these by two
products more what the bottleneck vectors and the weight get.

The weight norm w_k = g_k v_k / |v_k| is folded in: products are with v, and the factor of each prototype goes
where scores are scaled anyway. Where A_k is the gradient for w_k over |v_k|,

    grad v_k = g_k (A_k - v_k <v_k, A_k> / |v_k|^2)        grad g_k = <v_k, A_k>

Shapes used below: B images, V student views of which the first T are global, E bottleneck width, K
prototypes.
"""

import torch
from torch import Tensor

from nestling.backbones.linear import by_onednn, product
from nestling.ssl.distributed import cpu_multiplies_bf16
from nestling.ssl.heads import DeferredLogits, PrototypeLayer
from nestling.ssl.terms import compiled
from nestling.ssl.terms.pairs import FP16_SCALE, Comparison, Pairs, Scratch, block_size, with_gradients
from nestling.ssl.terms.targets import Targets

HELD_ON_CPU = 3 * 2**22  # logits at once: 48 MB of fp32, for which the weight is read a few times a step
HELD = 2**26  # the same elsewhere
SHARED = 8  # times as many logits in a block for torch's threads, as they wait for each other at every pass
ROWS_ON_CPU = 1024  # of the weight, folded at once
TURNED = 2048  # prototypes, whose slopes lie near the processor then
TINY = 1e-12  # as in F.normalize


def fused_loss(
    student: DeferredLogits,
    teacher: DeferredLogits,
    targets_of: Targets,
    batch_size: int,
    temperature: float,
    scratch: Scratch,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The mean over pairs and images; products are in `dtype`, as autocast has them, the rest in fp32."""
    dtype, layer = dtype or product_dtype(student), student.layer
    z, z_teacher = (x.vectors.detach().to(dtype).unflatten(0, (-1, batch_size)) for x in (student, teacher))
    w, w_teacher = (x.layer.weight_v.detach().to(dtype) for x in (student, teacher))
    pairs = Pairs([len(z)], len(z_teacher), batch_size)
    learns = student.learns and torch.is_grad_enabled()
    learns &= student.vectors.requires_grad or layer.weight_v.requires_grad
    scale = FP16_SCALE if dtype == torch.float16 else 1.0
    norms = norms_of(layer)
    gradient = Gradient(z, w, layer, norms, scratch)
    slope = layer.weight_g.detach().flatten() / norms / temperature
    compare = Comparison(pairs, slope, scale / (temperature * pairs.count), scratch, gradient.rescale)
    loss = slope.new_zeros(())
    held = HELD_ON_CPU if z.device.type == "cpu" else HELD
    worked_on = block_size(z)
    if not compiled.takes_rows(z) and torch.get_num_threads() > 1:
        worked_on *= SHARED
    for images in pairs.blocks(held, len(w)):
        logits = logits_of(z[:, images], w, scratch, "logits")
        of_teacher = logits_of(z_teacher[:, images], w_teacher, scratch, "teacher's logits")
        for few in pairs.blocks(worked_on, len(w), within=logits.shape[1]):
            block = [logits[:, few]]  # which becomes its gradient
            loss += compare(block, targets_of(of_teacher[:, few]), block if learns else None)
        if learns:
            gradient.add(images, logits)
        del logits, of_teacher, block  # before the next images take as much
    loss *= temperature / scale
    return with_gradients(loss, scale, *gradient.folded(student.vectors)) if learns else loss


def logits_of(vectors: Tensor, weight: Tensor, scratch: Scratch, name: str) -> Tensor:
    """Shape: (V, n, E), (K, E) -> (V, n, K)."""
    rows = vectors.flatten(0, 1)
    if by_onednn(rows, weight):
        return product(rows, weight).unflatten(0, (len(vectors), -1))
    logits = scratch(name, (len(rows), len(weight)), rows)
    return torch.mm(rows, weight.mT, out=logits).unflatten(0, (len(vectors), -1))


def times(rows: Tensor, weight: Tensor) -> Tensor:
    """rows weight^T. Shape: (R, C), (D, C) -> (R, D)."""
    return product(rows, weight) if by_onednn(rows, weight) else rows @ weight.mT


def put(into: Tensor, found: Tensor, is_first: bool) -> None:
    """Write, or add to what is there."""
    if is_first:
        into.copy_(found)
    else:
        into.add_(found)


class Gradient:
    """Gathers what bottleneck vectors z, (V, B, E), and the last layer get from the slopes for the logits.

    `rescale`, (K,), makes slopes for z v^T of them: g_k / |v_k|, or 1 / |v_k| where g is learned too. `norms`
    are |v_k|, (K,).
    """

    def __init__(self, z: Tensor, w: Tensor, layer: PrototypeLayer, norms: Tensor, scratch: Scratch) -> None:
        self._z, self._w, self._layer, self._norms, self._scratch = z, w, layer, norms, scratch
        gain = layer.weight_g.detach()
        self._learned_gain = gain if layer.weight_g.requires_grad else None
        self.rescale = gain.flatten() / norms if self._learned_gain is None else norms.reciprocal()
        self._of_z: Tensor = torch.empty(0)
        self._of_w: Tensor = torch.empty(0)

    def add(self, images: slice, slopes: Tensor) -> None:
        """Of a block of images, the first one first; with a learned gain `slopes` (V, n, K) are changed."""
        is_first = images.start == 0
        if is_first:
            self._of_z = torch.empty_like(self._z, dtype=self.rescale.dtype)
            self._of_w = compiled.empty_like(self._w, self.rescale.dtype, is_filled=True)
        rows, z = slopes.flatten(0, 1), self._z[:, images].flatten(0, 1)
        if compiled.takes_rows(rows) and (rows.dtype == torch.bfloat16 or by_onednn(rows, self._w.mT)):
            self._add_turned(rows, z, is_first)
        elif self._of_w.dtype == rows.dtype:
            self._of_w.addmm_(rows.mT, z, beta=0 if is_first else 1)
        else:
            put(self._of_w, rows.mT @ z, is_first)
        if self._learned_gain is not None:
            rows.mul_(self._learned_gain.flatten())
        self._of_z[:, images] = times(rows, self._w.mT).unflatten(0, (len(slopes), -1)).to(self._of_z.dtype)

    def _add_turned(self, rows: Tensor, z: Tensor, is_first: bool) -> None:
        """rows^T z by oneDNN, of a few prototypes at a time, whose slopes are turned first.

        Unturned they take 1.3 times as long, by MKL in fp32 and by oneDNN in bf16.
        """
        turned = self._scratch("turned", (TURNED, len(rows)), rows)
        for few, into in zip(rows.split(TURNED, dim=1), self._of_w.split(TURNED), strict=True):
            compiled.transpose(turned[: len(into)], few)
            put(into, times(turned[: len(into)], z.mT), is_first)

    @torch.no_grad()
    def folded(self, vectors: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The gradients, and what they are for."""
        v, g, along = self._layer.weight_v, self._layer.weight_g, torch.empty_like(self.rescale)[:, None]
        rows = ROWS_ON_CPU if v.device.type == "cpu" else len(v)
        squares = self._norms.square()[:, None]
        parts = (x.split(rows) for x in (self._of_w, v, squares, g, along))
        for a, v_part, square, g_part, sums in zip(*parts, strict=True):
            products = torch.mul(a, v_part, out=self._scratch("products", a.shape, a))
            torch.sum(products, dim=1, keepdim=True, out=sums)
            a.addcmul_(v_part, sums / square, value=-1)
            if self._learned_gain is not None:  # else it is in A
                a.mul_(g_part)
        gradients, inputs = [self._of_z.flatten(0, 1), self._of_w, along], [vectors, v, g]
        number = 2 if self._learned_gain is None else 3
        return gradients[:number], inputs[:number]


@torch.no_grad()
def norms_of(layer: PrototypeLayer) -> Tensor:
    """|v_k|, (K,)."""
    return torch.linalg.vector_norm(layer.weight_v, dim=1).clamp_min(TINY)


@torch.no_grad()
def gain_of(layer: PrototypeLayer) -> Tensor:
    """g_k / |v_k|, (K,): the factor of z v^T."""
    return layer.weight_g.flatten() / norms_of(layer)


def product_dtype(logits: DeferredLogits) -> torch.dtype:
    """What products are computed in: as autocast would, but in no half precision that the CPU lacks.

    There one product takes ten to a hundred times as long as in fp32.
    """
    dtype = logits.dtype or logits.layer.weight_v.dtype
    if logits.vectors.device.type == "cpu" and not (dtype == torch.bfloat16 and cpu_multiplies_bf16()):
        return torch.promote_types(dtype, torch.float32)
    return dtype
