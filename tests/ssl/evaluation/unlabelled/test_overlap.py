"""The neighbours that two networks share, against sets found by hand."""

import pytest
import torch

from nestling.ssl.data.failures import Failure
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.features import Rows
from nestling.ssl.evaluation.unlabelled.overlap import knn_overlap, nearest_images, overlap_of, overlaps


def rows(count, dim, seed=0):
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))


def nearest_sets(features, k):
    cosine = torch.nn.functional.normalize(features.double(), dim=1)
    similarities = (cosine @ cosine.mT).fill_diagonal_(-2)
    return [set(row.tolist()) for row in similarities.topk(k).indices]


@pytest.mark.parametrize("backend", ["torch", "faiss"])
def test_overlap_and_jaccard_are_those_of_the_sets(backend):
    first, second = rows(30, 5), torch.cat([rows(30, 5), rows(30, 3, seed=2)], dim=1)
    pairs = list(zip(nearest_sets(first, 4), nearest_sets(second, 4), strict=True))
    found = knn_overlap(first, second, 4, backend)
    assert found["overlap"] == pytest.approx(sum(len(a & b) / 4 for a, b in pairs) / 30)
    assert found["jaccard"] == pytest.approx(sum(len(a & b) / len(a | b) for a, b in pairs) / 30)
    assert 0.2 < found["overlap"] < 0.9


def test_a_network_shares_all_with_itself_and_by_chance_with_noise():
    features = rows(60, 8)
    assert knn_overlap(features, features @ torch.eye(8), 5) == {"overlap": 1, "jaccard": 1}
    chance = [knn_overlap(features, rows(60, 8, seed), 5)["overlap"] for seed in (1, 2, 3)]
    assert sum(chance) / 3 == pytest.approx(5 / 59, abs=0.03)
    copies = torch.ones(6, 3)  # all alike: neighbours by smallest index, never the image itself
    assert knn_overlap(copies, copies, 2)["overlap"] == 1


def test_only_images_that_both_could_read_are_compared():
    first, second = rows(12, 4), rows(12, 5, seed=1)
    failures = [Failure(3, "3.png", "no image")]
    kept = torch.tensor([index for index in range(12) if index != 3])
    whole = Rows(torch.arange(12), {"cls": first}, [])
    part = Rows(kept, {"cls": second[kept]}, failures)
    expected = {
        f"features/{name}/cls_k{k}": value
        for k in (4, 2)
        for name, value in knn_overlap(first[kept], second[kept], k).items()
    }
    for pair in ((whole, part), (part, whole)):
        assert overlaps(*pair, [4, 2]) == expected


def test_kept_neighbours_say_the_same_of_images_that_both_could_read():
    first, second = (
        Rows(torch.arange(12), {"cls": rows(12, 4)}, []),
        Rows(torch.arange(12), {"cls": rows(12, 5)}, []),
    )
    one, other = (nearest_images(side, 4)["cls"] for side in (first, second))
    assert one.dtype == torch.int32
    assert overlap_of(one, other) == overlaps(first, second, [4])["features/overlap/cls_k4"] < 1
    part = Rows(second.indices[3:], {"cls": second.vectors["cls"][3:]}, [])
    few = nearest_images(part, 4)["cls"]
    assert few[:, 0].tolist() == list(range(3, 12))
    by_hand = [len(set(a[1:].tolist()) & set(b[1:].tolist())) / 4 for a, b in zip(one[3:], few, strict=True)]
    assert overlap_of(one, few) == pytest.approx(sum(by_hand) / 9)
    assert overlap_of(one[:3], few) is None
    assert nearest_images(Rows(torch.tensor([3]), {"cls": rows(1, 4)}, []), 4) == {}


def test_more_neighbours_than_others_become_as_many_and_that_is_said(caplog):
    side = Rows(torch.arange(4), {"cls": rows(4, 3)}, [])
    assert overlaps(side, side, [2, 9]) == {
        f"features/{name}/cls_k{k}": 1 for name in ("overlap", "jaccard") for k in (2, 3)
    }
    assert "each image has only 3 others, so k=9 becomes k=3" in caplog.text
    one = Rows(torch.tensor([3]), {"cls": rows(1, 3)}, [])
    with pytest.raises(UserError, match="fewer than two images could be read by both"):
        overlaps(side, one, [2])


@pytest.mark.parametrize("k", [0, 5])
def test_the_measure_itself_refuses_them(k):
    with pytest.raises(UserError, match=rf"k={k} nearest others of 5 images; give 1 to 4"):
        knn_overlap(rows(5, 3), rows(5, 3), k)
