"""The last layer fused with the loss, against the two written out."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nestling.backbones import linear
from nestling.ssl.heads import DeferredLogits, PrototypeLayer
from nestling.ssl.terms import compiled, fused, pairs
from nestling.ssl.terms.dino import DinoTerm
from nestling.ssl.terms.fused import fused_loss, gain_of
from nestling.ssl.terms.pairs import Scratch
from nestling.ssl.terms.targets import Targets, winners
from nestling.ssl.terms.term import Outputs

B, E, K, V = 5, 8, 512, 4
TEMPERATURES = (0.1, 0.04)  # of the student and the teacher


def layers(is_gain_learned: bool, dtype: torch.dtype = torch.float64) -> list[PrototypeLayer]:
    """A student's and a teacher's, with gains and norms far from one."""
    torch.manual_seed(0)
    made = [PrototypeLayer(E, K, unit_norm=not is_gain_learned).to(dtype) for _ in range(2)]
    for layer in made:
        with torch.no_grad():
            layer.weight_v.mul_(torch.rand(K, 1) + 0.5)
            layer.weight_g.add_(torch.randn(K, 1).mul(0.3))
    made[1].requires_grad_(False)
    return made


def vectors(num_views: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    drawn = torch.randn(num_views * B, E, generator=draw, dtype=torch.float64)
    return F.normalize(drawn, dim=-1).to(dtype).requires_grad_()


def outputs(x: Tensor, layer: PrototypeLayer, is_fused: bool) -> Outputs:
    sizes = [2 * B, len(x) - 2 * B] if len(x) > 2 * B else [len(x)]
    return Outputs([], DeferredLogits(x, layer, sizes) if is_fused else layer(x).split(sizes), B)


def loss_as_written(student: Tensor, targets: Tensor) -> Tensor:
    """One pair of views after the other, of logits (V * B, K)."""
    log_p, q = (student / TEMPERATURES[0]).log_softmax(-1).split(B), targets.split(B)
    losses = [-(q[t] * log_p[v]).sum(-1).mean() for t in range(2) for v in range(len(log_p)) if t != v]
    return torch.stack(losses).mean()


@pytest.mark.parametrize("is_gain_learned", [False, True])
@pytest.mark.parametrize("images_held", [1, 2, B])
def test_loss_gradients_center_and_metrics_are_those_of_layer_and_pairs(
    monkeypatch, is_gain_learned, images_held
):
    monkeypatch.setattr(fused, "HELD_ON_CPU", images_held * V * K)
    monkeypatch.setattr(pairs, "CACHED", V * K)
    learning, averaged = layers(is_gain_learned)
    term = DinoTerm(K).double()
    term.center.center.normal_()
    plain_term, plain_layer = copy.deepcopy(term), copy.deepcopy(learning)
    for step in range(2):  # the second in the memory of the first
        x, plain_x, seen = vectors(V, step), vectors(V, step), vectors(2, 10 + step).detach()
        student, teacher = outputs(x, learning, True), outputs(seen, averaged, True)
        loss, metrics = term(student, teacher, TEMPERATURES[1])
        logits = averaged(seen)
        q = ((logits - plain_term.center.center) / TEMPERATURES[1]).softmax(-1)
        expected = loss_as_written(plain_layer(plain_x), q)
        plain_term.center.add(logits)
        entropy = torch.special.entr(q).sum(-1).mean()
        share = q.argmax(-1).bincount().max() / len(q)
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
        for name, value in {
            "teacher_entropy": entropy / torch.tensor(K).log(),
            "kl": expected - entropy,
        }.items():
            torch.testing.assert_close(metrics[name].item(), value.item(), rtol=0, atol=1e-9)
        assert metrics["dominant_prototype"].item() == pytest.approx(share.item())
        (3 * loss).backward()
        (3 * expected).backward()
        term.update()
        plain_term.update()
        torch.testing.assert_close(x.grad, plain_x.grad, rtol=0, atol=1e-10)
        torch.testing.assert_close(term.center.center, plain_term.center.center, rtol=0, atol=1e-12)
    for mine, theirs in zip(learning.parameters(), plain_layer.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-10)
    assert all(parameter.grad is None for parameter in averaged.parameters())


def gradients_in(dtype: torch.dtype, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """A loss and its gradients, times `scale`, with products in `dtype`."""
    kind = torch.promote_types(dtype, torch.float32)
    learning, averaged = layers(False, kind)
    x, seen = vectors(V, 0, kind), vectors(2, 1, kind).detach()
    student, teacher = outputs(x, learning, True).logits, outputs(seen, averaged, True).logits
    targets = Targets(torch.zeros(K, dtype=kind), TEMPERATURES[1], Scratch(), gain_of(averaged))
    loss = fused_loss(student, teacher, targets, B, TEMPERATURES[0], Scratch(), dtype)
    (scale * loss).backward()
    return loss.detach(), x.grad / scale, learning.weight_v.grad / scale


@pytest.mark.skipif(compiled.kernel is None, reason="the kernel is not built: run pip install -e .")
@pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch has no oneDNN")
@pytest.mark.parametrize("images_held", [2, B])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_products_of_turned_slopes_give_the_gradients_of_float64(monkeypatch, images_held, dtype, most):
    exact, turned, transpose = gradients_in(torch.float64, 1.0), [], compiled.transpose
    monkeypatch.setattr(linear, "multiplies_faster", lambda: True)
    monkeypatch.setattr(linear, "WORTH_IT", 0)
    monkeypatch.setattr(fused, "HELD_ON_CPU", images_held * V * K)
    monkeypatch.setattr(fused, "TURNED", 100)  # the last time 12
    monkeypatch.setattr(compiled, "transpose", lambda *given: turned.append(1) or transpose(*given))
    for mine, theirs in zip(gradients_in(dtype, 1.0), exact, strict=True):
        assert (mine - theirs).norm() <= most * theirs.norm()
    assert len(turned) == 6 * -(-B // images_held)


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)]
)
def test_products_in_half_precision_stay_near_and_scaled_losses_do_not_overflow(dtype, most):
    exact, approximate = gradients_in(torch.float64, 1.0), gradients_in(dtype, 65536.0)
    for mine, theirs in zip(approximate, exact, strict=True):
        assert mine.isfinite().all()
        assert (mine - theirs).norm() <= most * theirs.norm()


def test_a_gradient_is_used_once_and_has_no_derivative():
    for is_fused in (True, False):
        learning, averaged = layers(False)
        x = vectors(V, 0)
        student, teacher = outputs(x, learning, is_fused), outputs(vectors(2, 1).detach(), averaged, is_fused)
        loss, _ = DinoTerm(K).double()(student, teacher, TEMPERATURES[1])
        with pytest.raises(RuntimeError, match="has no derivative"):
            torch.autograd.grad(loss, x, create_graph=True)
        loss, _ = DinoTerm(K).double()(student, teacher, TEMPERATURES[1])
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="used up by a backward pass"):
            loss.backward()


def test_without_a_gradient_only_the_loss_is_computed():
    learning, averaged = layers(False)
    student, teacher = outputs(vectors(V, 0), learning, True), outputs(vectors(2, 1).detach(), averaged, True)
    loss, _ = DinoTerm(K).double()(student, teacher, TEMPERATURES[1])
    with torch.no_grad():
        alone, _ = DinoTerm(K).double()(student, teacher, TEMPERATURES[1])
    assert torch.equal(loss, alone)
    assert loss.requires_grad
    assert not alone.requires_grad


def test_deferred_logits_are_what_the_layer_gives_in_the_precision_they_were_deferred_in():
    layer = layers(False, torch.float32)[0]
    x = vectors(V, 0, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        deferred, expected = DeferredLogits(x, layer, [2 * B, 2 * B]), layer(x)
    assert deferred[0].dtype == torch.bfloat16
    assert torch.equal(torch.cat(list(deferred)), expected)
    assert deferred[1] is deferred[1], "computed once"
    assert torch.equal(torch.cat(DeferredLogits(x, layer, [B, 3 * B])[:]), layer(x))


@pytest.mark.parametrize("width", [300, 512])
def test_winners_are_the_first_of_the_largest(width):
    ties = torch.randint(0, 4, (3, 7, width), generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(winners(ties), ties.argmax(-1))
