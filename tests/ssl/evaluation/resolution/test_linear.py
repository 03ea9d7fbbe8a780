"""The linear classifier against scikit-learn's minimum, and on features that are awkward."""

import pytest
import torch
from sklearn.linear_model import LogisticRegression

from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.resolution import linear
from nestling.ssl.evaluation.resolution.linear import fit_linear


def blobs(count, seed):
    """Five classes around fixed means, channels of very different scale."""
    means = torch.randn(5, 12, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(5, (count,), generator=generator)
    rows = means[labels] + 1.25 * torch.randn(count, 12, generator=generator)
    return rows * 10.0 ** torch.linspace(-3, 3, 12) + 50, labels


@pytest.mark.parametrize("decay", [1e-1, 1e-3])
def test_the_minimum_is_the_one_that_scikit_learn_finds(decay, monkeypatch):
    monkeypatch.setattr(linear, "DECAYS", (decay,))
    (train, labels), (test, _) = blobs(300, 0), blobs(200, 1)
    mean, std = train.double().mean(0), train.double().std(0, correction=0)
    reference = LogisticRegression(C=1 / (decay * 300), tol=1e-8, max_iter=2000)
    reference.fit(((train - mean) / std).numpy(), labels.numpy())
    predicted = fit_linear(train, labels, 5)(test)
    expected = torch.from_numpy(reference.predict(((test - mean) / std).numpy()))
    assert (predicted == expected).double().mean() >= 0.99


def test_the_decay_that_classifies_held_out_images_best_is_taken(monkeypatch):
    (train, labels), (test, wanted) = blobs(100, 2), blobs(200, 3)

    def right(*decays):
        monkeypatch.setattr(linear, "DECAYS", decays)
        return (fit_linear(train, labels, 5)(test) == wanted).double().mean()

    assert right(1e4) < 0.4 < right(1e-2)  # with the first one the largest class always wins
    assert right(1e4, 1e-2) == right(1e-2)


def test_every_fifth_image_of_each_class_is_held_out():
    held = linear._held_out(torch.tensor([1, 0, 1, 1, 0, 1, 1, 1, 2, 1]))
    assert held.nonzero().flatten().tolist() == [6]  # class 1 alone has five


def test_channels_that_never_change_and_a_missing_class_are_harmless():
    train, labels = blobs(100, 4)
    train[:, 3] = 7
    classify = fit_linear(train, labels, 9)  # classes 5 to 8 have no image
    test, wanted = blobs(200, 5)
    test[:, 3] = -1e6
    assert (classify(test) == wanted).double().mean() > 0.5
    few = torch.tensor([[0.0, 1], [1, 0]])
    assert fit_linear(few, torch.tensor([0, 1]), 2)(few).tolist() == [0, 1]
    with pytest.raises(UserError, match="at least two training images and found 1"):
        fit_linear(few[:1], torch.tensor([0]), 2)
