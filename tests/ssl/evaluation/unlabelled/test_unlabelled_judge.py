"""Judging without labels: which images and views are looked at, and that nothing is touched."""

import logging
import random

import numpy as np
import pytest
import torch

from nestling import backbones
from nestling.ssl.config import Config, Data, Knn, Views
from nestling.ssl.data.channels import normalisation
from nestling.ssl.data.sources.opening import open_source
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.unlabelled import judge as judging
from nestling.ssl.evaluation.unlabelled.judge import UnlabelledJudge
from nestling.ssl.evaluation.unlabelled.spectrum import alpha_req, rankme
from nestling.ssl.evaluation.unlabelled.sphere import alignment, uniformity
from nestling.ssl.evaluation.unlabelled.views import GlobalView
from nestling.ssl.views.render import normalize

VIEWS = Views(global_size=[16, 32], num_local=2)


def tiny():
    torch.manual_seed(0)
    return backbones.create("xcit_nano_12_p4", embed_dim=16, depth=1, num_heads=2).train()


def settings(**changes):
    knn = Knn(pooling=["mean_patch", "cls"], crop_ratio=1.0, batch_size=7, **changes)
    return Config(data=Data(num_workers=0), views=VIEWS, knn=knn)


@pytest.fixture
def source(image_folder):
    return open_source(Data(train=str(image_folder(classes=1, per_class=20))), "train")


def test_the_values_are_those_of_features_made_by_hand(source, monkeypatch):
    monkeypatch.setattr(judging, "ALIGNED", 5)
    judge, backbone = UnlabelledJudge(source, settings(max_val=10)), tiny()
    values = judge.judge(backbone, "cpu")
    names = [f"features/{name}" for name in ("rankme", "alpha_req", "uniformity", "alignment")]
    assert list(values) == [f"{name}/{pooling}" for pooling in ("mean_patch", "cls") for name in names]

    def features(images):
        pixels = torch.stack([torch.from_numpy(image.copy()) for image in images])
        with torch.no_grad():
            return backbone.eval()(normalize(pixels, *normalisation(Data()))).cls

    images = [source.load(index) for index in range(0, 20, 2)]  # 32 pixels: nothing is resized
    shown = features([image.transpose(2, 0, 1) for image in images])
    first, second = (
        features([GlobalView(VIEWS, 32, 0, number)(image, place) for place, image in enumerate(images[::2])])
        for number in (0, 1)
    )
    expected = (rankme(shown), alpha_req(shown), uniformity(shown), alignment(first, second))
    assert [values[f"{name}/cls"] for name in names] == pytest.approx(expected, rel=1e-4)
    again = judge.judge(backbone, "cpu")  # from the images kept in memory
    assert {name: again.pop(f"features/overlap/{name}_k9") for name in ("mean_patch", "cls")} == {
        "mean_patch": 1,
        "cls": 1,
    }  # with itself; of ten images each has nine others
    assert again == values


def test_two_views_differ_and_come_back_the_same(source):
    image = source.load(0)
    first, second = (GlobalView(VIEWS, 16, 3, number) for number in (0, 1))
    assert first.size == (16, 16)
    assert first(image, 4).shape == (3, 16, 16)
    assert np.array_equal(first(image, 4), first(image, 4))
    for other in (second(image, 4), first(image, 5), GlobalView(VIEWS, 16, 4, 0)(image, 4)):
        assert not np.array_equal(first(image, 4), other)


def test_judging_leaves_every_state_as_it_was(source):
    backbone = tiny()
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
    UnlabelledJudge(source, settings()).judge(backbone, "cpu")
    assert draws() == expected
    assert all(part.training for part in backbone.modules())
    for name, value in backbone.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_unreadable_images_are_left_out_and_named(source, caplog):
    with open(source.path(3), "wb") as file:
        file.write(b"no image")
    judge = UnlabelledJudge(source, settings())
    with caplog.at_level(logging.WARNING, "nestling"):
        seen = judge.seen(tiny(), "cpu")
    assert len(seen.images.indices) == len(seen.views[0].indices) == len(seen.views[1].indices) == 19
    assert judge.ledger.paths() == [source.path(3)]
    assert caplog.text.count("left out") == 1


def test_a_broken_network_is_told_by_an_image(source):
    backbone = tiny()
    with torch.no_grad():
        backbone.norm.weight.fill_(torch.nan)
    with pytest.raises(UserError, match=r"mean_patch of 20 images, such as .*0000\.png, is not finite"):
        UnlabelledJudge(source, settings()).judge(backbone, "cpu")
