"""Scores of pixels against plain definitions: windows, labels of patches, votes, loss, IoU."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dense_subjects import scene, tiny_backbone, write_scenes
from sklearn.metrics import jaccard_score

from nestling.ssl.config import Data
from nestling.ssl.data.ledger import Ledger
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.dense import patch_knn
from nestling.ssl.evaluation.dense.crops import crop_batches, orders
from nestling.ssl.evaluation.dense.folder import MaskedImages
from nestling.ssl.evaluation.dense.grids import token_maps
from nestling.ssl.evaluation.dense.iou import Confusion
from nestling.ssl.evaluation.dense.linear import lr_share, pixel_loss
from nestling.ssl.evaluation.dense.settings import PatchKnn
from nestling.ssl.evaluation.dense.sliding import Windows, best_class, starts

CPU = torch.device("cpu")


def windows(size=16, batch_size=2):
    return Windows(tiny_backbone(), Data(), size, 1, CPU, batch_size)


def test_miou_is_that_of_the_whole_set_and_equals_scikit_learn():
    random = np.random.default_rng(0)
    masks = [random.integers(0, 4, (9, 7)).astype(np.uint8), np.zeros((5, 5), np.uint8)]
    masks[0][0] = 255
    predicted = [random.integers(0, 4, mask.shape) for mask in masks]
    confusion = Confusion(6)
    for said, mask in zip(predicted, masks, strict=True):
        confusion.add(said, mask)
    truth, said = (np.concatenate([part.ravel() for part in parts]) for parts in (masks, predicted))
    known = truth != 255
    wanted = jaccard_score(truth[known], said[known], labels=range(4), average=None)
    classes = confusion.classes(list("abcdef"))
    assert [score.iou for score in classes] == pytest.approx([*wanted, None, None])
    assert confusion.results()["miou"] == pytest.approx(wanted.mean())
    assert confusion.results()["pixel_accuracy"] == pytest.approx((truth == said)[known].mean())


@pytest.mark.parametrize(("length", "size"), [(16, 16), (17, 16), (40, 16), (100, 9), (3, 1)])
def test_windows_cover_a_side_and_end_with_it(length, size):
    begins = starts(length, size)
    assert {place for begin in begins for place in range(begin, begin + size)} == set(range(length))
    assert all(1 <= after - before <= size for before, after in pairwise(begins))


def test_a_prediction_is_the_argmax_of_the_mean_over_windows():
    image, shown = scene(3)[0], windows()
    weights = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))

    def score(maps):
        return torch.einsum("kd,bdhw->bkhw", weights, maps)

    high, wide = shown.shape(40, 56)
    assert (high, wide) == (16, 22)
    total, times = np.zeros((5, high, wide)), np.zeros((high, wide))
    for corners, maps in shown.maps(image):
        for (top, left), one in zip(corners, maps, strict=True):
            total[:, top : top + 16, left : left + 16] += F.interpolate(
                score(one[None]), (16, 16), mode="bilinear"
            )[0].numpy()
            times[top : top + 16, left : left + 16] += 1
    mean = torch.from_numpy(total / times)[None]
    wanted = F.interpolate(mean, (40, 56), mode="bilinear")[0].argmax(0)
    assert (shown.predict(image, score) == wanted.numpy()).mean() > 0.999


def test_few_classes_at_a_time_find_the_best_of_many():
    scores = torch.randn(37, 4, 5, generator=torch.Generator().manual_seed(0))
    assert (best_class(scores, (4, 5)) == scores.argmax(0).numpy()).all()


def test_the_label_of_a_patch_is_that_of_most_of_its_pixels():
    mask = np.random.default_rng(0).choice([0, 1, 3, 255], (13, 10)).astype(np.uint8)
    labels = patch_knn.patch_labels(mask, (3, 4))
    for row in range(3):
        for column in range(4):
            inside = [
                int(mask[y, x])
                for y in range(13)
                for x in range(10)
                if (y * 3 // 13, x * 4 // 10) == (row, column)
            ]
            most = max(inside.count(label) for label in inside)
            assert labels[row, column] == min(label for label in inside if inside.count(label) == most)


def test_votes_are_the_plain_softmax_over_the_nearest_patches(tmp_path, monkeypatch):
    monkeypatch.setattr(patch_knn, "ASKED", 7)
    monkeypatch.setattr(patch_knn, "ASKING", 5)
    pairs = MaskedImages(str(write_scenes(tmp_path, count=3)), Data(), "data.train")
    settings = PatchKnn(k=9, temperature=0.1, memory=60)
    memory = patch_knn.PatchMemory(pairs, windows(), 3, settings, Ledger(0, 3))
    assert len(memory.labels) == 60
    maps = torch.randn(2, 16, 3, 2, generator=torch.Generator().manual_seed(0))
    votes = memory.score(maps)
    assert votes.sum(1) == pytest.approx(1)
    asking = F.normalize(maps[1, :, 2, 0], dim=0)
    similarities = memory.features.float() @ asking
    nearest = similarities.argsort(descending=True)[:9]
    weights = (similarities[nearest] / 0.1).softmax(0)
    wanted = [float(weights[memory.labels[nearest] == number].sum()) for number in range(3)]
    assert votes[1, :, 2, 0].tolist() == pytest.approx(wanted, abs=1e-5)
    again = patch_knn.PatchMemory(pairs, windows(batch_size=5), 3, settings, Ledger(0, 3))
    assert torch.equal(again.labels, memory.labels)
    few = patch_knn.PatchMemory(pairs, windows(), 3, PatchKnn(k=9, memory=2), Ledger(0, 3))
    assert (len(few.labels), few.k) == (2, 2)


def test_the_loss_is_the_mean_over_the_pixels_that_are_not_ignored():
    scores = torch.randn(2, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    masks = torch.randint(0, 3, (2, 4, 4), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    masks[0, 0] = 255
    logs = F.interpolate(scores, (4, 4), mode="bilinear").log_softmax(1)
    terms = [
        -float(logs[image, int(masks[image, y, x]), y, x])
        for image in range(2)
        for y in range(4)
        for x in range(4)
        if masks[image, y, x] != 255
    ]
    assert float(pixel_loss(scores, masks)) == pytest.approx(math.fsum(terms) / len(terms), rel=1e-5)


def test_the_learning_rate_rises_then_falls_to_nothing():
    shares = [lr_share(step, 100, 10) for step in range(101)]
    assert shares.index(max(shares)) == 10
    assert shares[10] == pytest.approx(0.9)
    assert shares[100] == 0


def test_each_pass_holds_every_image_once_and_crops_depend_on_the_seed_alone(tmp_path):
    drawn = [image for step in orders(5, 3, 10, seed=1) for image in step]
    assert [sorted(drawn[first : first + 5]) for first in range(0, 30, 5)] == [[0, 1, 2, 3, 4]] * 6
    pairs = MaskedImages(str(write_scenes(tmp_path, count=3)), Data(), "data.train")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (
        list(crop_batches(pairs, Data(num_workers=workers), 3, 24, 2, 3, seed))
        for seed, workers in ((0, 0), (0, 1), (1, 0))
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert first[0].images.shape == (2, 3, 24, 24)
    assert all(torch.equal(one.images, two.images) for one, two in zip(first, again, strict=True))
    assert not torch.equal(first[0].images, other[0].images)


def test_a_crop_keeps_mask_and_image_together(tmp_path):
    """Red stays redder than green in class 1 and the other way round in class 2, however colours change."""
    pairs = MaskedImages(str(write_scenes(tmp_path, count=3)), Data(), "data.train")
    for crops in crop_batches(pairs, Data(num_workers=0), 3, 32, 2, 4, seed=0):
        lead = crops.images[:, 0].float() - crops.images[:, 1].float()
        for number, sign in ((1, 1), (2, -1)):
            there = crops.masks == number
            assert not there.any() or ((sign * lead)[there] > 0).float().mean() > 0.9


def test_maps_are_the_patches_in_their_grid_and_blocks_are_put_side_by_side():
    backbone = tiny_backbone()
    pixels = torch.randn(2, 3, 12, 16, generator=torch.Generator().manual_seed(0))
    features = backbone(pixels)
    maps = token_maps(backbone, pixels)
    assert maps.shape == (2, 16, 3, 4)
    assert torch.equal(maps[1, :, 2, 1], features.patches[1, 2 * 4 + 1])
    both = token_maps(backbone, pixels, 2)
    assert torch.allclose(both[:, 16:], maps, atol=1e-5)
    with pytest.raises(UserError, match=r"blocks=50: .* not 50"):
        token_maps(backbone, pixels, 50)
