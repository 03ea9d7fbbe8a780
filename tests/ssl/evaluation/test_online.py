"""Online k-NN: classes by name, an even subset, each image once, and the same on every process."""

import logging
import random

import numpy as np
import pytest
import torch

from nestling import backbones
from nestling.ssl.config import Config, Data, Knn, Views
from nestling.ssl.data.channels import normalisation
from nestling.ssl.data.sources.base import Subset, evenly
from nestling.ssl.data.sources.opening import open_source
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.knn import knn
from nestling.ssl.evaluation.labels import matched_labels
from nestling.ssl.evaluation.online import OnlineKnn


def tiny():
    torch.manual_seed(0)
    return backbones.create("xcit_nano_12_p4", embed_dim=16, depth=1, num_heads=2)


def settings(**changes):
    knn_settings = Knn(k=[3, 1], pooling=["mean_patch", "cls"], crop_ratio=1.0, batch_size=7, **changes)
    return Config(data=Data(num_workers=0), views=Views(global_size=[16, 32]), knn=knn_settings)


def opened(folder):
    return open_source(Data(train=str(folder)), "train")


@pytest.fixture
def pair(image_folder):
    train = image_folder("train", classes=["ant", "bee", "cat"], per_class=8)
    val = image_folder("val", classes=["bee", "cat"], per_class=4, seed=1)  # numbered from 0 by itself
    return opened(train), opened(val)


def test_classes_are_matched_by_name(pair):
    train, val = pair
    train_labels, val_labels, names = matched_labels(train, val)
    assert names == ["ant", "bee", "cat"]
    assert [names[label] for label in train_labels] == [
        train.path(i).split("/")[-2] for i in range(len(train))
    ]
    assert [names[label] for label in val_labels] == [val.path(i).split("/")[-2] for i in range(len(val))]


def test_images_of_unknown_classes_are_left_out_and_counted(pair, image_folder, caplog):
    val = opened(image_folder("more", classes=["bee", "eel"], per_class=4, seed=2))
    with caplog.at_level(logging.WARNING, "nestling"):
        judge = OnlineKnn(pair[0], val, settings())
    assert "left out 4 of 8 validation images, of 1 classes that data.train lacks: eel" in caplog.text
    assert len(judge.val) == 4
    assert judge.val_labels.tolist() == [1, 1, 1, 1]


def test_what_cannot_be_judged_is_refused(pair, image_folder):
    flat = opened(image_folder("flat", classes=1))
    other = opened(image_folder("other", classes=["x", "y"]))
    with pytest.raises(UserError, match=r"data\.val=.*flat has none.*\(knn\.every=0\)$"):
        OnlineKnn(pair[0], flat, settings())
    with pytest.raises(UserError, match=r"data\.train=.*flat has none"):
        OnlineKnn(flat, pair[1], settings())
    with pytest.raises(UserError, match=r"no class of data\.val"):
        OnlineKnn(pair[0], other, settings())
    with pytest.raises(UserError, match=r"3 files are both in data\.train"):
        OnlineKnn(pair[0], Subset(pair[0], [0, 5, 9]), settings())


def test_the_judgement_equals_knn_on_features_made_by_hand(pair):
    judge, backbone = OnlineKnn(*pair, settings()), tiny()
    results = judge.judge(backbone, "cpu")
    assert list(results) == [f"knn/{pool}/top1_k{k}" for pool in ("mean_patch", "cls") for k in (3, 1)]
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in normalisation(Data()))
    features = []
    for source in pair:  # 32 pixels: the largest global size, so no resizing
        images = torch.stack([torch.tensor(source.load(i)).permute(2, 0, 1) for i in range(len(source))])
        with torch.no_grad():
            features.append(backbone.eval()((images / 255 - mean) / std).cls)
    expected = knn(features[0], judge.train_labels, features[1], judge.val_labels, [3, 1])
    assert {f"knn/cls/{name}": value for name, value in expected.items()}.items() <= results.items()
    assert judge.judge(backbone, "cpu") == results  # from the images kept in memory


def test_images_whose_features_are_not_finite_are_named_by_path(pair):
    broken = tiny()
    with torch.no_grad():
        broken.cls_token.fill_(torch.inf)
    with pytest.raises(
        UserError, match=r"cls of 24 images \(\S+/ant/0000\.png, .*, …\) of data\.train is not fin"
    ):
        OnlineKnn(*pair, settings()).judge(broken, "cpu")


@pytest.mark.parametrize("backend", ["faiss", "torch"])
def test_judging_leaves_every_state_as_it_was(pair, backend):
    backbone = tiny().train()
    state = {name: value.clone() for name, value in backbone.state_dict().items()}

    def draws():
        return torch.rand(1).item(), np.random.rand(), random.random(), torch.get_num_threads()

    def seed():
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)

    seed()
    expected = draws()
    seed()
    judge = OnlineKnn(*pair, settings(backend=backend))
    judge.judge(backbone, "cpu")
    judge.judge_pixels()
    judge.examples(backbone, "cpu")
    assert draws() == expected
    assert all(part.training for part in backbone.modules())
    for name, value in backbone.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_raw_pixels_and_examples_come_from_the_same_images(pair):
    judge = OnlineKnn(*pair, settings())
    assert list(judge.judge_pixels()) == ["knn/pixels/top1_k3", "knn/pixels/top1_k1"]
    examples = judge.examples(tiny(), "cpu", num_queries=4, num_neighbours=2)
    assert [query.label for query in examples] == ["bee", "bee", "cat", "cat"]
    assert all(len(query.neighbours) == len(query.neighbour_labels) == 2 for query in examples)
    assert np.array_equal(examples[0].image, judge.val.load(1))  # the middle of the first quarter
    assert len(judge.examples(tiny(), "cpu", num_queries=99)) == 8


def test_a_limit_takes_training_images_evenly(pair):
    judge = OnlineKnn(*pair, settings(max_train=6))
    assert judge.train_labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert evenly(10, 4).tolist() == [0, 2, 5, 7]
    assert evenly(3, 4).tolist() == evenly(3, None).tolist() == [0, 1, 2]


def test_stripes_of_other_colours_and_widths_are_told_apart(pair, image_folder):
    val = image_folder("same", classes=["ant", "bee", "cat"], per_class=4, seed=3)
    judge = OnlineKnn(pair[0], opened(val), settings())
    assert judge.judge(tiny(), "cpu")["knn/cls/top1_k3"] > 0.6
