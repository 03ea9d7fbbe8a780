"""k-NN against the published definition written out, scikit-learn, and what must not happen."""

import logging
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.knn import effective_ks, knn, search, voting

BACKENDS = ["faiss", "torch"]


def clusters(num_images, num_classes, seed, dim=24, spread=1.6, dtype=torch.float32):
    """Noisy class clusters, so that neighbours are neither all right nor all wrong."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(num_classes, dim, generator=torch.Generator().manual_seed(99))
    labels = torch.randint(num_classes, (num_images,), generator=generator)
    noise = spread * torch.randn(num_images, dim, generator=generator)
    return (centers[labels] + noise).to(dtype), labels


def published_knn(train_features, train_labels, test_features, test_labels, k, temperature, num_classes):
    """The published classifier: chunks of test images, top k, one-hot votes, exp(similarity / T)."""
    train, test = F.normalize(train_features.double(), dim=1), F.normalize(test_features.double(), dim=1)
    top1 = top5 = 0
    for chunk in range(0, len(test), 7):
        queries, targets = test[chunk : chunk + 7], test_labels[chunk : chunk + 7]
        similarity = torch.mm(queries, train.t())
        distances, indices = similarity.topk(k, largest=True, sorted=True)
        candidates = train_labels.view(1, -1).expand(len(queries), -1)
        retrieved = torch.gather(candidates, 1, indices)
        one_hot = torch.zeros(len(queries) * k, num_classes, dtype=torch.double)
        one_hot.scatter_(1, retrieved.view(-1, 1), 1)
        weights = distances.clone().div_(temperature).exp_()
        probabilities = (one_hot.view(len(queries), -1, num_classes) * weights.view(len(queries), -1, 1)).sum(
            1
        )
        _, predictions = probabilities.sort(1, True)
        correct = predictions.eq(targets.view(-1, 1))
        voted = probabilities.gather(1, predictions) > 0  # the original also counts classes without a vote
        top1 += correct[:, :1].sum().item()
        top5 += (correct & voted)[:, :5].sum().item()
    return top1 / len(test), top5 / len(test)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [0.07, 1.0])
def test_knn_equals_the_published_definition(backend, temperature):
    train, test = clusters(400, 10, seed=0), clusters(93, 10, seed=1)
    results = knn(*train, *test, [1, 5, 20, 50], temperature, 10, backend)
    for k in (1, 5, 20, 50):
        top1, top5 = published_knn(*train, *test, k, temperature, 10)
        assert results[f"top1_k{k}"] == pytest.approx(top1, abs=1e-12)
        assert results[f"top5_k{k}"] == pytest.approx(top5, abs=1e-12)
    assert 0.3 < results["top1_k20"] < 0.95  # neither trivial nor hopeless


def test_several_k_come_from_one_search(monkeypatch):
    searches = []

    def counted(train, test, k, *settings):
        searches.append(k)
        return search(train, test, k, *settings)

    monkeypatch.setattr(voting, "search", counted)
    assert len(knn(*clusters(60, 3, seed=0), *clusters(9, 3, seed=1), [1, 5, 20, 50])) == 4
    assert searches == [50]


@pytest.mark.parametrize("backend", BACKENDS)
def test_top1_equals_scikit_learn(backend):
    neighbors = pytest.importorskip("sklearn.neighbors")
    train, test = clusters(300, 7, seed=2), clusters(80, 7, seed=3)
    results = knn(*train, *test, [3, 20], 0.07, 7, backend)
    for k in (3, 20):
        peer = neighbors.KNeighborsClassifier(
            k, metric="cosine", algorithm="brute", weights=lambda distances: np.exp((1 - distances) / 0.07)
        ).fit(train[0].double().numpy(), train[1].numpy())
        assert results[f"top1_k{k}"] == pytest.approx(peer.score(test[0].double().numpy(), test[1].numpy()))


@pytest.mark.parametrize("copies", [1, 3, 400])
def test_both_backends_return_the_same_bits(copies):
    train, test = clusters(1200 // copies, 5, seed=4)[0].repeat(copies, 1), clusters(40, 5, seed=5)[0]
    for k in (1, 10, 60):
        found = [search(train, test, k, backend) for backend in BACKENDS]
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_search_equals_a_stable_sort_of_all_similarities(backend):
    train, test = clusters(500, 5, seed=6)[0], clusters(30, 5, seed=7)[0]
    train[250:] = train[:250]  # each neighbour twice
    every = F.normalize(test).double() @ F.normalize(train).double()[:250].mT
    expected = every.repeat(1, 2).sort(dim=1, descending=True, stable=True)
    similarities, indices = search(train, test, 25, backend)
    assert torch.equal(indices, expected.indices[:, :25])
    torch.testing.assert_close(similarities, expected.values[:, :25].float())


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_neighbours_rank_by_smallest_index(backend):
    train = torch.eye(8)[[3, 0, 0, 0, 1, 2, 2, 4]].repeat(20, 1)
    _, indices = search(train, torch.eye(8)[[0]], 5, backend)
    assert indices.tolist() == [[1, 2, 3, 9, 10]]
    _, indices = search(train, torch.eye(8)[[7]], 6, backend)  # orthogonal to all
    assert indices.tolist() == [[0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_votes_go_to_the_smallest_class(backend):
    train = torch.tensor([[1.0, 1.0], [1.0, -1.0]])  # both at 45 degrees from the query
    query = torch.tensor([[1.0, 0.0]])
    for labels in ([4, 1], [1, 4]):
        assert (
            knn(train, torch.tensor(labels), query, torch.tensor([1]), [2], backend=backend)["top1_k2"] == 1
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_class_without_a_vote_is_never_among_the_five(backend):
    train, labels = torch.eye(10), torch.arange(10)
    results = knn(train, labels, train[[0]], torch.tensor([1]), [1], num_classes=10, backend=backend)
    assert results == {"top1_k1": 0, "top5_k1": 0}


def test_a_faint_vote_counts_at_any_temperature():
    train = F.normalize(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    labels = torch.tensor([0, 6])
    results = knn(train, labels, train[[0]], torch.tensor([6]), [2], temperature=1e-3)
    assert results == {"top1_k2": 0, "top5_k2": 1}


@pytest.mark.parametrize("backend", BACKENDS)
def test_k_above_the_training_set_is_clamped_and_said_once(backend, caplog):
    train, test = clusters(13, 3, seed=8), clusters(1, 3, seed=9)
    num_train = len(train[0])
    voting._say_clamped.cache_clear()  # another test may have had as many
    with caplog.at_level(logging.WARNING, "nestling"):
        for _ in range(3):
            results = knn(*train, *test, [5, 20, 200], backend=backend)
    assert list(results) == ["top1_k5", f"top1_k{num_train}"]  # three classes: no top-5
    assert [record.getMessage() for record in caplog.records] == [
        f"k-NN: there are only {num_train} training images, so k=20, k=200 become k={num_train}"
    ]


def test_effective_ks_keep_their_order_and_come_once():
    assert effective_ks([20, 10, 20], 100) == [20, 10]
    with pytest.raises(UserError, match=r"knn\.k"):
        effective_ks([], 3)
    with pytest.raises(UserError, match=r"knn\.k"):
        effective_ks([0, 3], 3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_type_works_and_the_callers_tensors_stay(backend, kind):
    train, test = clusters(60, 3, seed=10, dtype=kind), clusters(20, 3, seed=11, dtype=kind)
    train_features = train[0].T.contiguous().T.requires_grad_()  # not contiguous, and with gradient
    before = train_features.detach().clone(), test[0].clone()
    knn(train_features, train[1], *test, [5], backend=backend)
    assert torch.equal(train_features.detach(), before[0])
    assert torch.equal(test[0], before[1])


def test_float32_features_are_not_normalised_in_place():
    train, test = clusters(60, 3, seed=10), clusters(20, 3, seed=11)
    before = train[0].clone(), test[0].clone()
    knn(*train, *test, [5])
    assert torch.equal(train[0], before[0])
    assert torch.equal(test[0], before[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_features_that_are_not_finite_are_refused_by_index(bad):
    train, test = clusters(30, 3, seed=12), clusters(30, 3, seed=13)
    test[0][[4, 17], 3] = bad
    with pytest.raises(UserError, match=r"test features .* index 4, 17$"):
        knn(*train, *test, [5])
    with pytest.raises(UserError, match=r"training features .* 0, 1, .*, 9 and 20 more$"):
        knn(torch.full((30, 24), bad), train[1], *test, [5])


@pytest.mark.parametrize("backend", BACKENDS)
def test_constant_features_are_ranked_by_index_with_a_warning(backend, caplog):
    with caplog.at_level(logging.WARNING, "nestling"):
        similarities, indices = search(torch.ones(200, 4), torch.ones(3, 4), 5, backend)
    assert "constant" in caplog.text
    assert indices.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert similarities.max() <= 1


def test_zero_features_stay_zero():
    similarities, indices = search(torch.zeros(30, 4), torch.eye(4), 2)
    assert not similarities.any()
    assert indices.tolist() == [[0, 1]] * 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_sizes_beyond_one_tile_change_nothing(backend, monkeypatch):
    train, test = clusters(700, 9, seed=14), clusters(50, 9, seed=15)
    whole = knn(*train, *test, [7, 30], backend=backend)
    for name, size in (
        ("exact.TILE", 1000),
        ("exact.BLOCK", 90),
        ("backends.TILE", 400),
        ("voting.VOTES", 90),
    ):
        monkeypatch.setattr(f"nestling.ssl.evaluation.knn.{name}", size)
    assert knn(*train, *test, [7, 30], backend=backend) == whole


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_labels": torch.tensor([0, 1, -1])}, "labels reach from -1"),
        ({"num_classes": 2}, "outside 0 to 1"),
        ({"train_labels": torch.tensor([0, 1])}, r"3 training features but labels of shape \(2,\)"),
        ({"test_features": torch.ones(2, 5)}, r"\(3, 4\) and \(2, 5\)"),
        ({"test_features": torch.ones(0, 4), "test_labels": torch.ones(0)}, "at least one test image"),
        ({"backend": "annoy"}, "choose auto, faiss or torch"),
    ],
)
def test_what_cannot_be_compared_is_refused(change, message):
    given = {
        "train_features": torch.eye(4)[:3],
        "train_labels": torch.tensor([0, 1, 2]),
        "test_features": torch.ones(2, 4),
        "test_labels": torch.tensor([0, 1]),
        "ks": [2],
    }
    with pytest.raises(UserError, match=message):
        knn(**(given | change))


@pytest.mark.slow
def test_thread_counts_come_back_and_children_forked_after_a_search_live():
    code = """
        import os, torch
        torch.set_num_threads(2)
        from nestling.ssl.evaluation.knn import search
        search(torch.randn(3000, 64), torch.randn(500, 64), 10)
        import faiss
        assert torch.get_num_threads() == 2 and faiss.omp_get_max_threads() == 2
        search(torch.randn(3000, 64), torch.randn(500, 64), 10)
        assert torch.get_num_threads() == 2 and faiss.omp_get_max_threads() == 2
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)
    fork = """
        import os, torch
        torch.set_num_threads(1)
        from nestling.ssl.evaluation.knn import search
        search(torch.randn(3000, 64), torch.randn(500, 64), 10)
        child = os.fork()
        if child == 0:
            search(torch.randn(3000, 64), torch.randn(500, 64), 10)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(fork)], check=True, timeout=120)
