"""Label propagation and the measures of DAVIS against plain loops."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from nestling.ssl.evaluation.dense import propagation
from nestling.ssl.evaluation.dense.davis import ObjectScore, one_hot, palette_of, sharpened, summary
from nestling.ssl.evaluation.dense.propagation import propagate
from nestling.ssl.evaluation.dense.settings import Propagation
from nestling.ssl.evaluation.dense.video_scores import contour, contour_accuracy, dilated, region_similarity


def propagated_as_written(frames, labels, last, topk, radius, temperature):
    """Patch by patch: list all sources, keep the best, average their labels."""
    known, (_, high, wide) = [labels], labels.shape
    for now in range(1, len(frames)):
        sources = sorted({0, *range(max(1, now - last), now)})
        result = torch.zeros_like(labels)
        for row in range(high):
            for column in range(wide):
                candidates = [
                    (
                        float(
                            F.cosine_similarity(frames[now][:, row, column], frames[source][:, y, x], dim=0)
                        ),
                        source,
                        y,
                        x,
                    )
                    for source in sources
                    for y in range(high)
                    for x in range(wide)
                    if radius == 0 or (abs(y - row) <= radius and abs(x - column) <= radius)
                ]
                best = sorted(candidates, reverse=True)[:topk]
                weights = [math.exp(similarity / temperature) for similarity, *_ in best]
                for weight, (_, source, y, x) in zip(weights, best, strict=True):
                    result[:, row, column] += weight / sum(weights) * known[source][:, y, x]
        known.append(result)
    return known[1:]


@pytest.mark.parametrize(("last", "radius"), [(2, 1), (0, 0)])
def test_propagation_equals_the_loop_over_patches_and_sources(last, radius, monkeypatch):
    monkeypatch.setattr(propagation, "AT_ONCE", 5)
    source = torch.Generator().manual_seed(0)
    frames = [torch.randn(4, 3, 4, generator=source) for _ in range(5)]
    labels = torch.rand(3, 3, 4, generator=source)
    settings = Propagation(last_frames=last, topk=3, radius=radius, temperature=0.2)
    wanted = propagated_as_written(frames, labels, last, 3, radius, 0.2)
    found = [*propagate(frames, labels, settings)]
    assert len(found) == 4
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def contour_as_written(mask):
    high, wide = mask.shape
    edge = np.zeros_like(mask)
    for y in range(high):
        for x in range(wide):
            others = [(y, x + 1), (y + 1, x), (y + 1, x + 1)]
            if y == high - 1 or x == wide - 1:
                others = [place for place in others[:2] if place[0] < high and place[1] < wide]
            edge[y, x] = any(mask[place] != mask[y, x] for place in others)
    return edge


def test_contours_and_disks_equal_their_definition():
    mask = np.random.default_rng(0).random((9, 12)) > 0.7
    assert (contour(mask) == contour_as_written(mask)).all()
    near = [
        [any((y - a) ** 2 + (x - b) ** 2 <= 4 for a, b in np.argwhere(mask)) for x in range(12)]
        for y in range(9)
    ]
    assert (dilated(mask, 2) == np.array(near)).all()


def squares(shift, size=(200, 300)):
    mask = np.zeros(size, bool)
    mask[50:90, 60 + shift : 100 + shift] = True
    return mask


def test_the_measures_of_shifted_squares():
    truth = squares(0)
    assert region_similarity(squares(8), truth) == pytest.approx(32 / 48)
    radius = math.ceil(0.008 * math.hypot(200, 300))
    assert radius == 3
    assert contour_accuracy(truth, truth) == contour_accuracy(squares(radius), truth) == 1
    assert contour_accuracy(squares(radius + 1), truth) < 1
    nothing = np.zeros_like(truth)
    assert (region_similarity(nothing, nothing), contour_accuracy(nothing, nothing)) == (1, 1)
    assert (region_similarity(nothing, truth), contour_accuracy(nothing, truth)) == (0, 0)


def test_means_are_over_objects_of_means_over_frames():
    scores = [ObjectScore("a", 1, [1.0, 0.4], [0.6, 0.6]), ObjectScore("a", 2, [0.2], [0.0])]
    found = summary(scores)
    assert found["j_mean"] == pytest.approx((0.7 + 0.2) / 2)
    assert found["j_recall"] == pytest.approx(0.25)
    assert found["f_mean"] == pytest.approx(0.3)
    assert found["jf_mean"] == pytest.approx((0.45 + 0.3) / 2)


def test_labels_of_patches_come_back_as_pixels():
    ids = np.zeros((16, 24), np.uint8)
    ids[4:12, 8:16], ids[:4, :4] = 2, 255
    labels = one_hot(ids, (4, 6))
    assert labels.shape == (3, 4, 6)
    assert labels.argmax(0)[1, 2] == 2
    assert labels.argmax(0)[0, 0] == 0
    back = sharpened(labels, (16, 24), (16, 24))
    assert set(np.unique(back)) == {0, 2}
    assert (back[5:11, 9:15] == 2).all()


def test_a_gray_mask_gets_the_colours_of_voc(tmp_path):
    Image.fromarray(np.zeros((2, 2), np.uint8)).save(tmp_path / "gray.png")
    assert palette_of(tmp_path / "gray.png")[:15] == [0, 0, 0, 128, 0, 0, 0, 128, 0, 128, 128, 0, 0, 0, 128]
