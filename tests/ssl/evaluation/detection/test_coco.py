"""Instances of a COCO-style json: polygons, both run-length codes, crowds, categories by name, flips."""

import json

import numpy as np
import pytest
import torch
from coco_shapes import write_shapes
from pycocotools import mask as rle

from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.detection.coco import JUDGED, CocoInstances


@pytest.fixture
def file(tmp_path):
    return write_shapes(tmp_path / "shapes", num_images=2)


def opened(file, **options):
    return CocoInstances(str(file), str(file.parent / "images"), Decoder(), **options)


def changed(file, *changes):
    """The same file with changes to its first instances."""
    content = json.loads(file.read_text())
    for item, change in zip(content["annotations"], changes, strict=False):
        item |= change
    file.with_name("changed.json").write_text(json.dumps(content))
    return file.with_name("changed.json")


def test_boxes_masks_and_labels_are_those_of_the_file(file):
    source = opened(file)
    sample = source.sample(0, JUDGED)
    assert (len(source), source.names) == (2, ["disc", "box"])  # by id: 3, then 7
    first, second = json.loads(file.read_text())["annotations"][:2]
    left, top, width, height = first["bbox"]
    assert sample.image.shape == (3, 64, 80)
    assert sample.target["boxes"][0].tolist() == [left, top, left + width, top + height]
    assert sample.target["labels"].tolist() == [2, 1]
    inside = torch.zeros(64, 80, dtype=torch.bool)
    inside[top : top + height, left : left + width] = True
    assert torch.equal(sample.target["masks"][0], inside)
    red = sample.image[0].int() - sample.image[2].int() > 150
    assert red[sample.target["masks"][0]].all()
    assert second["category_id"] == 3


def test_run_length_codes_are_read_like_polygons(file):
    expected = opened(file).sample(0).target["masks"]
    code = rle.encode(np.asfortranarray(expected[0].numpy().astype(np.uint8)))
    flat = expected[1].numpy().T.reshape(-1)
    edges = np.flatnonzero(np.diff(flat.astype(int))) + 1
    counts = np.diff([0, *edges, len(flat)]).tolist()
    codes = [
        {"segmentation": {"size": [64, 80], "counts": code["counts"].decode()}},
        {"segmentation": {"size": [64, 80], "counts": counts}},
    ]
    found = opened(changed(file, *codes)).sample(0).target["masks"]
    assert torch.equal(found, expected)


def test_a_crowd_is_judged_and_not_learned_and_other_categories_are_left_out(file, caplog):
    source = opened(changed(file, {"iscrowd": 1}), names=["box"])
    assert source.sample(0, epoch=0).target["labels"].tolist() == []
    judged = source.sample(0, JUDGED).target
    assert (judged["labels"].tolist(), judged["iscrowd"].tolist()) == ([1], [1])
    assert "2 instances of categories unknown to training" in caplog.text


def test_a_flip_moves_boxes_and_masks_with_the_pixels(file):
    plain, flipped = opened(file).sample(0, epoch=0), opened(file, flip=1.0).sample(0, epoch=0)
    assert torch.equal(flipped.image.flip(-1), plain.image)
    for box, mask in zip(flipped.target["boxes"].long(), flipped.target["masks"], strict=True):
        rows, columns = torch.nonzero(mask).T
        edges = [int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1]
        assert box.tolist() == edges
    assert torch.equal(opened(file, flip=1.0).sample(0, JUDGED).image, plain.image)


@pytest.mark.parametrize(
    "segmentation",
    [
        *([], [[]], [[1, 2, 3, 4]], [[1, 2, 3, 4, 5, 6, 7]], [["a"] * 6], [1, 2, 3, 4, 5, 6], "text", {}),
        *({"size": [80, 64], "counts": [64 * 80]}, {"size": [64, 80], "counts": [64 * 80 + 1]}),
        {"size": [64, 80], "counts": None},
    ],
)
def test_what_can_not_be_drawn_is_refused_before_the_work(file, segmentation):
    with pytest.raises(UserError, match=r"changed\.json: instance 2 has no segmentation that can be drawn"):
        opened(changed(file, {}, {"segmentation": segmentation}))


def test_an_image_of_another_size_than_said_is_named(file):
    text = file.read_text().replace('"height": 64', '"height": 63')
    file.write_text(text)
    with pytest.raises(UserError, match=r"0\.png has 64 x 80 pixels .*says 63 x 80"):
        opened(file).sample(0)
