"""The compiled kernel against PyTorch's passes and fp64, and against what would lead it out of its memory."""

import math
import os
import signal
import sys
import time

import numpy as np
import pytest
import torch
from torch import Tensor

from nestling.backbones import kernels
from nestling.ssl.terms import compiled
from nestling.ssl.terms.pairs import Comparison, Pairs, Scratch, multi_crop_loss
from nestling.ssl.terms.targets import Targets

pytestmark = pytest.mark.skipif(
    compiled.kernel is None, reason="the kernel is not built: run pip install -e ."
)

B, K = 3, 2051  # two chunks and three entries more
TEMPERATURE, TEACHER_TEMPERATURE = 0.1, 0.04


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def views_of(num_views: list[int], k: int = K) -> list[Tensor]:
    return [drawn(count, B, k, seed=seed) for seed, count in enumerate(num_views)]


def learned(views: list[Tensor], teacher: Tensor) -> tuple[Tensor, list[Tensor], Targets]:
    """Loss, gradients and what was seen of the teacher, by whichever way there is."""
    leaves = [view.clone().requires_grad_() for view in views]
    scratch = Scratch()
    center = drawn(teacher.shape[-1], seed=8).to(torch.promote_types(teacher.dtype, torch.float32))
    targets = Targets(center, TEACHER_TEMPERATURE, scratch)
    loss = multi_crop_loss(
        leaves, lambda images: targets(teacher[:, images]), len(teacher), TEMPERATURE, scratch
    )
    loss.backward()
    return loss.detach(), [leaf.grad for leaf in leaves], targets


def without_kernel(monkeypatch, call):
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "kernel", None)
        return call()


@pytest.mark.parametrize(
    ("num_global", "num_views"), [(1, [1, 2]), (2, [2, 3]), (2, [4]), (3, [3, 1, 2]), (3, [2, 3]), (2, [2])]
)
@pytest.mark.parametrize("k", [K, 64, 5])
def test_loss_gradient_and_metrics_are_those_of_the_passes_and_near_fp64(
    num_global, num_views, k, monkeypatch
):
    views, teacher = views_of(num_views, k), 2 * drawn(num_global, B, k, seed=9)
    ours = learned(views, teacher)
    exact = learned([view.double() for view in views], teacher.double())
    passes = without_kernel(monkeypatch, lambda: learned(views, teacher))
    for expected, most in ((passes, 1e-4), (exact, 1e-6)):  # entropies of passes lose more digits
        dtype = expected[0].dtype
        torch.testing.assert_close(ours[0].to(dtype), expected[0], rtol=2e-6, atol=0)
        for mine, theirs in zip(ours[1], expected[1], strict=True):
            assert (mine - theirs).norm() <= 1e-5 * theirs.norm()
        torch.testing.assert_close(ours[2].entropy.to(dtype), expected[2].entropy, rtol=most, atol=most)
        torch.testing.assert_close(ours[2].total.to(dtype), expected[2].total, rtol=1e-5, atol=1e-5)
        assert ours[2].dominance == pytest.approx(expected[2].dominance.item())
    assert ours[2].num_rows == num_global * B


def test_bf16_is_read_as_fp32_and_only_its_gradient_rounded(monkeypatch):
    views, teacher = [view.bfloat16() for view in views_of([2, 3])], drawn(2, B, K, seed=9).bfloat16()
    loss, gradients, targets = learned(views, teacher)
    expected, others, wanted = learned([view.float() for view in views], teacher.float())
    assert torch.equal(loss, expected)
    for mine, theirs in zip(gradients, others, strict=True):
        assert torch.equal(mine, theirs.bfloat16())
    assert torch.equal(targets.entropy, wanted.entropy)
    assert torch.equal(targets.total, wanted.total)
    passes, *_ = without_kernel(monkeypatch, lambda: learned(views, teacher))
    torch.testing.assert_close(loss, passes, rtol=1e-5, atol=0)


def test_fp16_is_left_to_the_passes():
    views, teacher = [view.half() for view in views_of([2, 3])], drawn(2, B, K, seed=9).half()
    loss, gradients, _ = learned(views, teacher)
    expected, others, _ = learned([view.float() for view in views], teacher.float())
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for mine, theirs in zip(gradients, others, strict=True):
        assert mine.dtype == torch.float16
        assert (mine.float() - theirs).norm() <= 1e-3 * theirs.norm()


def compared(gradient_in_place: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """With a slope and a factor of each prototype, of rows that lie apart."""
    logits = drawn(4, 2 * B, K).to(dtype)[:, ::2]
    q = drawn(2, B, K, seed=1).softmax(-1)
    gradient = logits if gradient_in_place else torch.empty_like(logits)
    slope, rescale = (5 + drawn(K, seed=seed).abs() for seed in (2, 3))
    compare = Comparison(Pairs([4], 2, B), slope, 0.25, Scratch(), rescale)
    return compare([logits], q, [gradient]), gradient


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_the_gradient_takes_the_place_of_the_logits_with_a_slope_of_each_prototype(dtype, most, monkeypatch):
    loss, gradient = compared(True, dtype)
    expected, expected_gradient = without_kernel(monkeypatch, lambda: compared(False, dtype))
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert (gradient - expected_gradient).norm() <= most * expected_gradient.norm()
    assert torch.equal(compared(False, dtype)[1], gradient)


def test_exponentials_are_exact_to_two_tenmillionths():
    x = torch.cat([-torch.arange(0, 75, 75 / (4 * K)), torch.tensor([-200.0, -math.inf])])
    q = torch.empty(1, 1, len(x))
    compiled.make_targets(x[None, None], torch.zeros(1), torch.ones(1), q)
    exact = x.double().exp()
    ratio = (q.double() * exact.sum() / exact).flatten()[:-2]
    assert (ratio / ratio[0] - 1).abs().max() <= 2e-7
    assert q.flatten()[-2:].tolist() == [0, 0]


@pytest.mark.parametrize("scale", [1e3, 1e4])
def test_extreme_logits_give_what_fp64_gives(scale):
    views = [scale * view for view in views_of([2, 2])]
    teacher = scale * drawn(2, B, K, seed=9)
    ours = learned(views, teacher)
    exact = learned([view.double() for view in views], teacher.double())
    torch.testing.assert_close(ours[0].double(), exact[0], rtol=1e-5, atol=0)
    for mine, theirs in zip(ours[1], exact[1], strict=True):
        assert (mine - theirs).norm() <= 1e-3 * theirs.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1500, K - 1])
def test_what_is_not_finite_is_told_as_torch_tells_it(bad, place, dtype, monkeypatch):
    views, teacher = [view.to(dtype) for view in views_of([2, 2])], drawn(2, B, K, seed=9).to(dtype)
    views[1][1, 2, place] = bad
    (loss, gradients, _), (expected, others, _) = (
        learned(views, teacher),
        without_kernel(monkeypatch, lambda: learned(views, teacher)),
    )
    assert not loss.isfinite()
    assert not expected.isfinite()
    for mine, theirs in zip(gradients, others, strict=True):
        assert torch.equal(mine.isfinite(), theirs.isfinite())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_teacher_that_is_not_finite_is_told(bad):
    views, teacher = views_of([2, 2]), drawn(2, B, K, seed=9)
    teacher[0, 1, 7] = bad
    loss, gradients, targets = learned(views, teacher)
    assert not loss.isfinite()
    assert not gradients[1][:, 1].isfinite().any()
    assert not targets.entropy.isfinite()


@pytest.mark.parametrize("in_torchs", [True, False])
def test_all_numbers_of_threads_give_the_same_bits(in_torchs, threads, monkeypatch):
    monkeypatch.setattr(compiled, "WORTH_A_THREAD", 1)
    monkeypatch.setattr(kernels, "PROCESS", os.getpid() if in_torchs else -1)
    views, teacher = views_of([2, 3]), drawn(2, B, K, seed=9)
    made = []
    for number in (1, 2, 5):
        threads(number)
        made.append(learned(views, teacher))
    for loss, gradients, targets in made[1:]:
        assert torch.equal(loss, made[0][0])
        assert all(torch.equal(a, b) for a, b in zip(gradients, made[0][1], strict=True))
        assert torch.equal(targets.entropy, made[0][2].entropy)
        assert torch.equal(targets.total, made[0][2].total)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch may bring another OpenMP")
def test_work_is_done_in_torchs_threads(threads, monkeypatch):
    monkeypatch.setattr(compiled, "WORTH_A_THREAD", 1)
    monkeypatch.setattr(compiled, "pool", None)
    threads(2)
    calls = []
    compiled.share(lambda *given: calls.append(given), 5, 100)
    assert calls == [(0, 5, 2)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_has_threads_of_its_own(threads, monkeypatch):
    monkeypatch.setattr(compiled, "WORTH_A_THREAD", 1)
    threads(2)
    rows, total = drawn(2, B, K), torch.zeros(K)
    compiled.add_rows(total, rows)
    child = os.fork()
    if not child:
        again = torch.zeros(K)
        compiled.add_rows(again, rows)
        os._exit(0 if np.array_equal(again.numpy(), total.numpy()) else 1)
    for _ in range(100):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.1)
    else:
        os.kill(child, signal.SIGKILL)
        pytest.fail("the fork waits for threads that it does not have")
    assert status == 0


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (16, 32), (37, 53), (16, 15), (3, 40)])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_of_rows_is_turned(rows, columns, number, dtype, threads, monkeypatch):
    monkeypatch.setattr(compiled, "WORTH_A_THREAD", 1)
    threads(number)
    given = drawn(rows, columns + 5).to(dtype)[:, 2 : columns + 2]
    out = torch.full((columns, rows), math.nan, dtype=dtype)
    compiled.transpose(out, given)
    assert torch.equal(out, given.mT)


def test_other_tensors_go_the_other_way():
    assert compiled.takes(torch.ones(2, 3))
    assert not compiled.takes(torch.ones(2, 3), torch.ones(2, 3, dtype=torch.float64))
    assert not compiled.takes(torch.ones(2, 3).bfloat16())
    assert compiled.takes_rows(torch.ones(2, 3), torch.ones(2, 3).bfloat16())
    assert not compiled.takes_rows(torch.ones(2, 3).half())
    assert not compiled.takes(torch.ones(3, 2).mT)
    assert not compiled.takes(torch.ones(2, 0))
    assert not compiled.takes(torch.ones(2, 3, device="meta"))


GOOD = {
    "logits": np.ones((2, 3, 8), np.float32),
    "gradients": np.ones((2, 3, 8), np.float32),
    "targets": np.ones((2, 3, 8), np.float32),
    "slope": np.ones(8, np.float32),
    "rescale": np.ones(1, np.float32),
    "losses": np.ones(3),
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"logits": np.ones((2, 3, 9), np.float32)},
        {"logits": np.ones((2, 4, 8), np.float32)},
        {"logits": np.ones((2, 3, 8))},
        {"logits": np.ones((2, 3, 8), np.int16)},
        {"slope": np.ones(8, np.uint16)},
        {"logits": np.ones((2, 3, 16), np.float32)[..., ::2]},
        {"gradients": np.ones((1, 3, 8), np.float32)},
        {"gradients": bytes(8)},
        {"targets": np.ones((3, 8), np.float32)},
        {"targets": np.ones((2, 3, 0), np.float32)},
        {"slope": np.ones(7, np.float32)},
        {"rescale": np.ones(2, np.float32)},
        {"losses": np.ones(2)},
        {"losses": np.ones(3, np.float32)},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_what_does_not_fit_is_refused(wrong):
    compiled.kernel.compare(*GOOD.values(), 0, 1.0, 1)
    with pytest.raises((ValueError, BufferError), match=r"another type or shape|not writable"):
        compiled.kernel.compare(*{**GOOD, **wrong}.values(), 0, 1.0, 1)
    for arrays in ((GOOD["slope"][:7], GOOD["logits"]), (GOOD["slope"], GOOD["slope"])):
        with pytest.raises(ValueError, match="another type or shape"):
            compiled.kernel.add_rows(*arrays, 1)
    rows, wide = np.ones((3, 4), np.float32), np.ones((4, 6), np.float32)
    for out in (
        wide[:, :2].copy(),
        wide[:3, :3].copy(),
        wide[None],
        wide[:, ::2],
        wide[:, :3],
        np.ones((4, 3), np.uint16),
    ):
        with pytest.raises(ValueError, match="another type or shape"):
            compiled.kernel.transpose(out, rows, 1)
    told = np.ones((2, 3, 1))
    with pytest.raises(ValueError, match="another type or shape"):
        compiled.kernel.targets(GOOD["logits"], GOOD["slope"], GOOD["slope"], GOOD["targets"], told, 1)
