"""Multinomial logistic regression by L-BFGS along a path of penalties, in float64.

scikit-learn's problem: for each c the minimum over W (C, D) and b (C,) of

    mean over images of -log softmax(W x + b)[label]  +  |W|^2 / (2 c N)

without a penalty on b. Two classes are a softmax of two as well. Shapes used below: N images, D channels,
C classes.
"""

import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

log = logging.getLogger("nestling")

ROWS = 1 << 24  # numbers of the vectors that are float64 at a time: 128 MB
NEVER = -1e30  # bias of a class without an image: at the minimum it is minus infinity
FAR = 100  # times the tolerance: where it is said that the minimum was not reached


def regularisation_path(
    vectors: Tensor,
    labels: Tensor,
    num_classes: int,
    cs: Sequence[float],
    max_iterations: int = 1000,
    tolerance: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """The minimum for each c; the path starts at the smallest, and each c where the one before ended.
    A class without an image has weight 0 and a bias so low that it is never said.

    It is reached where no entry of the gradient is above `tolerance`, or the objective moves by less than its
    square.

    Shape:
        vectors: (N, D), labels: (N,) -> weights (len(cs), C, D), biases (len(cs), C), float64
    """
    count, dim = vectors.shape
    present, labels = labels.unique(return_inverse=True)
    weight = vectors.new_zeros(len(present), dim, dtype=torch.float64)
    bias = vectors.new_zeros(len(present), dtype=torch.float64)
    found: dict[float, tuple[Tensor, Tensor]] = {}
    unfinished = []
    for c in sorted(set(cs)):
        weight, bias, gradient = _minimum(
            vectors, labels, weight, bias, 1 / (c * count), max_iterations, tolerance
        )
        found[c] = (weight, bias)
        if gradient > FAR * tolerance or not weight.isfinite().all():
            unfinished.append(c)
    if unfinished:
        log.warning(
            "logistic regression stopped after %d iterations before its minimum at c = %s; more iterations, "
            "or standardised features, would reach it",
            max_iterations,
            ", ".join(f"{c:g}" for c in unfinished),
        )
    weights, biases = (torch.stack([found[c][part] for c in cs]) for part in (0, 1))
    every_weight = weights.new_zeros(len(cs), num_classes, dim)
    every_bias = biases.new_full((len(cs), num_classes), NEVER)
    every_weight[:, present], every_bias[:, present] = weights, biases
    return every_weight, every_bias


def _minimum(
    vectors: Tensor,
    labels: Tensor,
    weight: Tensor,
    bias: Tensor,
    penalty: float,
    max_iterations: int,
    tolerance: float,
) -> tuple[Tensor, Tensor, float]:
    """L-BFGS from there; also the largest entry of the gradient where it ended."""
    # W = V * unit: else a penalty of 1e6 would curve W far more than b, and L-BFGS crawl.
    unit = (1 + penalty) ** -0.5
    scaled, free = weight / unit, bias.clone()
    optimizer = torch.optim.LBFGS(
        [scaled, free],
        max_iter=max_iterations,
        max_eval=3 * max_iterations,
        tolerance_grad=tolerance,
        tolerance_change=tolerance**2,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def objective() -> float:
        value, slope, free.grad = loss_and_gradient(vectors, labels, scaled * unit, free, penalty)
        scaled.grad = slope * unit
        return value

    optimizer.step(objective)
    objective()
    assert scaled.grad is not None
    assert free.grad is not None
    steepest = max(float(scaled.grad.abs().max()), float(free.grad.abs().max()))
    return scaled.detach() * unit, free.detach(), steepest


def loss_and_gradient(
    vectors: Tensor, labels: Tensor, weight: Tensor, bias: Tensor, penalty: float
) -> tuple[float, Tensor, Tensor]:
    """The objective and its gradient, (softmax - one-hot)^T x / N + penalty * W, in bounded memory.

    Shape:
        vectors: (N, D), labels: (N,), weight: (C, D), bias: (C,) -> value, (C, D), (C,)
    """
    loss = weight.new_zeros(())
    slope, of_bias = torch.zeros_like(weight), torch.zeros_like(bias)
    for rows, wanted in _parts(vectors, labels):
        logs = (rows @ weight.mT + bias).log_softmax(dim=1)  # n C
        loss -= logs.gather(1, wanted[:, None]).sum()
        error = logs.exp()
        error.scatter_add_(1, wanted[:, None], error.new_full((len(rows), 1), -1))
        slope += error.mT @ rows
        of_bias += error.sum(dim=0)
    count = len(vectors)
    value = loss / count + penalty / 2 * weight.square().sum()
    return value.item(), slope / count + penalty * weight, of_bias / count


def _parts(vectors: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    rows = max(1, ROWS // vectors.shape[1])
    for part, wanted in zip(vectors.split(rows), labels.split(rows), strict=True):
        yield part.double(), wanted
