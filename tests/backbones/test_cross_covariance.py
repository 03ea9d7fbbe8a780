"""The core of XCA against its equation, and its hand-written gradient against numbers and autograd's."""

import pytest
import torch
import torch.nn.functional as F

from nestling.backbones.cross_covariance import cross_covariance

B, N, H, D = 2, 5, 3, 4


def inputs(dtype=torch.float64):
    torch.manual_seed(0)
    qkv, temperature = torch.randn(B, N, 3, H, D, dtype=dtype), torch.rand(H, 1, 1, dtype=dtype) + 0.5
    return qkv.requires_grad_(), temperature.requires_grad_()


def as_written(qkv, temperature):
    """Section 3.2, one head of one image after the other."""
    images = []
    for image in qkv:  # N 3 H D
        heads = []
        for head in range(H):
            q, k, v = (part.T for part in image[:, :, head].unbind(1))  # D N
            attention = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).T * temperature[head]).softmax(-1)
            heads.append((attention @ v).T)
        images.append(torch.cat(heads, dim=-1))
    return torch.stack(images)


def test_values_and_gradients_are_those_of_the_equation():
    found, expected = inputs(), inputs()
    ours, theirs = cross_covariance(*found), as_written(*expected)
    direction = torch.randn_like(theirs)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    for outputs in (ours, theirs):
        (outputs * direction).sum().backward()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-12)


def test_gradients_are_those_of_finite_differences():
    assert torch.autograd.gradcheck(cross_covariance, inputs())


def test_what_is_not_trained_is_computed_alike():
    qkv, temperature = inputs()
    trained = cross_covariance(qkv, temperature)
    with torch.no_grad():
        torch.testing.assert_close(cross_covariance(qkv, temperature), trained, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_nearly_the_same_gradients(dtype):
    found, expected = inputs(torch.float32), inputs(torch.float32)
    cross_covariance(found[0].to(dtype), found[1]).float().square().sum().backward()
    cross_covariance(*expected).square().sum().backward()
    for one, other in zip(found, expected, strict=True):
        assert (one.grad - other.grad).norm() < 0.03 * other.grad.norm()


def test_large_numbers_do_not_overflow_fp16():
    qkv, temperature = inputs(torch.float32)
    wide = cross_covariance((300 * qkv.detach()).half().expand(B, N, 3, H, D), temperature.detach())
    assert wide.isfinite().all()


def test_a_channel_of_zeros_has_finite_gradients():
    qkv, temperature = inputs()
    with torch.no_grad():
        qkv[:, :, 0, 1, 2] = 0
        qkv[:, :, 1, 0] = 0
    cross_covariance(qkv, temperature).square().sum().backward()
    assert qkv.grad.isfinite().all()
    assert temperature.grad.isfinite().all()


def test_a_second_derivative_is_refused_but_by_transforms():
    qkv, temperature = inputs()
    (gradient,) = torch.autograd.grad(
        cross_covariance(qkv, temperature).square().sum(), qkv, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()

    def second(attention):
        def slope(x):
            return torch.func.grad(lambda x: attention(x, temperature.detach()).square().sum())(x)

        return torch.func.grad(lambda x: slope(x).square().sum())(qkv.detach())

    torch.testing.assert_close(second(cross_covariance), second(as_written), rtol=0, atol=1e-9)
