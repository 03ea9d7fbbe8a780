import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from nestling.ssl.terms.dino import DinoTerm, dino_loss
from nestling.ssl.terms.term import Outputs

B, K = 6, 40


def loss_as_written(student, targets, temperature):
    """Algorithm 1, one pair of views after the other."""
    losses = []
    for t, q in enumerate(targets):
        for v, logits in enumerate(student):
            if v != t:
                losses.append(-(q * F.log_softmax(logits / temperature, dim=-1)).sum(dim=-1).mean())
    return sum(losses) / len(losses)


def views(num: int, seed: int = 0) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(B, K, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(num)]


def outputs(logits: list[torch.Tensor]) -> Outputs:
    return Outputs([], [torch.cat(logits[:2]), *([torch.cat(logits[2:])] if logits[2:] else [])], B)


@pytest.mark.parametrize("num_views", [2, 3, 5, 10])
def test_loss_and_gradient_equal_the_double_loop(num_views):
    ours, written = views(num_views), views(num_views)
    targets = torch.stack([view.detach().div(0.04).softmax(-1) for view in views(2, seed=1)])
    loss, expected = dino_loss(ours, targets, 0.1), loss_as_written(written, targets, 0.1)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
    loss.backward()
    expected.backward()
    for mine, theirs in zip(ours, written, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-10)


class Exponentiated(TorchDispatchMode):
    """How many elements go through an exponential."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if re.search(r"softmax|logsumexp|exp", func.__name__):
            self.count += args[0].numel()
        return func(*args, **(kwargs or {}))


def test_a_view_is_exponentiated_once_however_many_it_is_compared_with(monkeypatch):
    monkeypatch.setattr("nestling.ssl.terms.compiled.kernel", None)
    student, teacher = views(10), [view.detach() for view in views(2, seed=1)]
    with Exponentiated() as ours:
        loss, _ = DinoTerm(K).double()(outputs(student), outputs(teacher), 0.04)
        loss.backward()
    assert ours.count == (10 + 2) * B * K, "18 pairs"
    with Exponentiated() as written:
        loss_as_written(student, torch.stack(teacher).softmax(-1), 0.1)
    assert written.count == (18 + 2) * B * K, "so it counts"


@pytest.mark.parametrize("num_views", [2, 6])
def test_the_term_equals_lightlys_loss_over_several_steps(num_views):
    from lightly.loss import DINOLoss

    term, lightlys = DinoTerm(K, 0.1, 0.9).double(), DINOLoss(K, student_temp=0.1).double()
    for step in range(3):
        ours, theirs = views(num_views, seed=step), views(num_views, seed=step)
        teacher = [view.detach() for view in views(2, seed=100 + step)]
        loss, _ = term(outputs(ours), outputs(teacher), 0.0625)
        expected = lightlys(teacher, theirs, teacher_temp=0.0625)  # which it rounds to fp32
        term.update()
        loss.backward()
        expected.backward()
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
        torch.testing.assert_close(term.center.center, lightlys.center.flatten(), rtol=0, atol=1e-10)
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=1e-10)


def test_a_uniform_teacher_and_student_lose_exactly_log_k():
    flat = [torch.zeros(B, K, dtype=torch.float64)] * 4
    loss, metrics = DinoTerm(K).double()(outputs(flat), outputs(flat[:2]), 0.04)
    assert loss.item() == pytest.approx(math.log(K), abs=1e-12)
    assert metrics["teacher_entropy"].item() == pytest.approx(1.0)
    assert metrics["kl"].item() == pytest.approx(0.0, abs=1e-12)


def test_the_divergence_is_that_of_the_pairs():
    student, teacher = views(4), [view.detach() for view in views(2, seed=1)]
    _, metrics = DinoTerm(K).double()(outputs(student), outputs(teacher), 0.04)
    targets = [view.div(0.04).softmax(-1) for view in teacher]
    pairs = [(t, v) for t in range(2) for v in range(4) if t != v]
    expected = sum(
        F.kl_div(F.log_softmax(student[v] / 0.1, -1), targets[t], reduction="batchmean") for t, v in pairs
    ) / len(pairs)
    assert metrics["kl"].item() == pytest.approx(expected.item(), abs=1e-10)


def test_the_dominant_prototype_is_counted_over_the_global_views():
    teacher = torch.zeros(2 * B, K, dtype=torch.float64)
    teacher[:9, 3] = 1.0
    teacher[9:, 5] = 1.0
    _, metrics = DinoTerm(K).double()(outputs(views(3)), Outputs([], [teacher], B), 0.04)
    assert metrics["dominant_prototype"].item() == pytest.approx(9 / 12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_softmaxed_and_centered_in_fp32(dtype):
    term = DinoTerm(K)
    student = [view.detach().to(dtype) for view in views(3)]
    teacher = [(100 * view.detach()).to(dtype) for view in views(2, seed=1)]
    loss, _ = term(outputs(student), outputs(teacher), 0.04)
    exact, _ = DinoTerm(K)(
        outputs([view.float() for view in student]), outputs([view.float() for view in teacher]), 0.04
    )
    assert loss.dtype == torch.float32
    assert torch.equal(loss, exact)


def test_the_teacher_gets_no_gradient_from_its_own_view():
    student = views(2)
    targets = torch.stack([view.detach().softmax(-1) for view in views(2, seed=1)])
    changed = targets.clone()
    changed[0] = changed[0].flip(-1)
    first = torch.autograd.grad(dino_loss(student, targets, 0.1), student)
    second = torch.autograd.grad(dino_loss(student, changed, 0.1), student)
    assert torch.equal(first[0], second[0]), "view 0 is paired with the teacher's view 1 alone"
    assert not torch.equal(first[1], second[1])


def test_gradients_of_fp16_logits_survive_a_large_batch():
    """Each is far below what fp16 can hold, as a batch of 64 has them; the scaled loss gives them back."""
    torch.manual_seed(0)
    student = [torch.randn(2 * 64, K).half().requires_grad_() for _ in range(2)]
    exact = [logits.detach().double().requires_grad_() for logits in student]
    teacher = torch.randn(2 * 64, K)
    for logits, dtype, scale in ((student, torch.float16, 65536.0), (exact, torch.float64, 1.0)):
        term = DinoTerm(K).to(torch.promote_types(dtype, torch.float32))
        targets = Outputs([], [teacher.half().to(dtype)], 64)
        loss, _ = term(Outputs([], logits, 64), targets, 0.04)
        (scale * loss).backward()
    for mine, theirs in zip(student, exact, strict=True):
        torch.testing.assert_close(mine.grad.double() / 65536, theirs.grad, rtol=2e-3, atol=1e-9)
