"""L-BFGS against scikit-learn's LogisticRegression."""

import pytest
import torch
from sklearn.linear_model import LogisticRegression

from nestling.ssl.evaluation.linear import logistic

CS = (1.0, 1e-6, 1e-2, 100.0)


@pytest.fixture(scope="module")
def data():
    torch.manual_seed(0)
    labels = torch.arange(90) % 4
    return torch.randn(90, 6) + torch.randn(4, 6)[labels] + 0.5, labels


def test_each_minimum_of_the_path_is_that_of_scikit_learn(data, monkeypatch):
    """Of four classes that have images; the fifth, which has none, is never said."""
    vectors, labels = data
    labels = torch.tensor([0, 1, 3, 4])[labels]
    monkeypatch.setattr(logistic, "ROWS", 6 * 40)  # in three parts
    weights, biases = logistic.regularisation_path(vectors, labels, 5, CS, tolerance=1e-9)
    assert weights.dtype == torch.float64
    exact = vectors.double().numpy()
    for c, weight, bias in zip(CS, weights, biases, strict=True):
        reference = LogisticRegression(C=c, tol=1e-10, max_iter=10000).fit(exact, labels.numpy())
        expected = torch.from_numpy(reference.coef_)
        torch.testing.assert_close(
            weight[[0, 1, 3, 4]], expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())
        )
        logits = vectors.double() @ weight.mT + bias
        shares = torch.from_numpy(reference.predict_proba(exact))
        torch.testing.assert_close(logits.softmax(1)[:, [0, 1, 3, 4]], shares, rtol=1e-4, atol=1e-6)
        assert float((logits.argmax(1) == labels).double().mean()) == reference.score(exact, labels.numpy())


def test_the_gradient_is_that_of_autograd(data):
    vectors, labels = data
    weight = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, dtype=torch.float64, requires_grad=True)
    logits = vectors.double() @ weight.mT + bias
    loss = torch.nn.functional.cross_entropy(logits, labels) + 0.15 * weight.square().sum()
    value, slope, of_bias = logistic.loss_and_gradient(vectors, labels, weight.detach(), bias.detach(), 0.3)
    assert abs(value - loss.item()) < 1e-12
    for found, expected in zip((slope, of_bias), torch.autograd.grad(loss, (weight, bias)), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_path_that_stops_early_says_so(data, caplog):
    logistic.regularisation_path(*data, 4, [100.0], max_iterations=1)
    assert "stopped after 1 iterations before its minimum at c = 100" in caplog.text
