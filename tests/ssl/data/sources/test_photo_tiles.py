import importlib.util
import pickle

import numpy as np
import pytest

from nestling.ssl.config import Data
from nestling.ssl.data.sources import photo_tiles
from nestling.ssl.data.sources.opening import open_source
from nestling.ssl.data.sources.photo_tiles import PHOTOGRAPHS, PhotoTiles, photograph
from nestling.ssl.errors import UserError


@pytest.fixture(scope="module")
def train():
    return open_source(Data(train="photo-tiles"), "train")


@pytest.fixture(scope="module")
def val():
    return open_source(Data(val="photo-tiles"), "val")


def places(photo, tile):
    """Columns at which a tile occurs in a photograph."""
    windows = np.lib.stride_tricks.sliding_window_view(photo[..., 1], (32, 32))
    near = windows[..., 0, 0] == tile[0, 0, 1]
    rows, columns = np.nonzero(near)
    return [c for r, c in zip(rows, columns, strict=True) if (photo[r : r + 32, c : c + 32] == tile).all()]


def test_nineteen_photographs_give_200_and_50_tiles_each(train, val):
    assert len(PHOTOGRAPHS) == 19
    for source, count in ((train, 200), (val, 50)):
        assert np.bincount(source.labels).tolist() == [count] * 19
        assert source.load(0).shape == (32, 32, 3)
        assert source.load(0).dtype == np.uint8
        assert len({source.path(i) for i in range(len(source))}) == len(source) == 19 * count
        assert source.class_names[0] == "astronaut"
    assert not {"moon", "page", "motorcycle_left", "motorcycle_right"} & set(train.class_names)


def test_validation_tiles_lie_in_the_last_quarter_and_training_tiles_in_the_rest(train, val):
    for name in ("chelsea", "clock_motion"):
        photo, label = photograph(name), train.class_names.index(name)
        cut = photo.shape[1] - photo.shape[1] // 4
        for index in np.flatnonzero(train.labels == label)[::50]:
            assert min(places(photo, train.load(index))) + 32 <= cut
        for index in np.flatnonzero(val.labels == label)[::10]:
            assert max(places(photo, val.load(index))) >= cut


def test_every_tile_shows_something_and_none_repeats_its_place(train, val):
    for source in (train, val):
        tiles = np.stack([source.load(i) for i in range(len(source))])
        assert tiles.mean(axis=3).std(axis=(1, 2)).min() >= 3.99
        assert len(np.unique(tiles.reshape(len(tiles), -1), axis=0)) > 0.95 * len(tiles)


def test_the_tiles_are_the_same_every_time_and_survive_pickling(val):
    again = pickle.loads(pickle.dumps(PhotoTiles("val")))
    assert all(np.array_equal(again.load(i), val.load(i)) for i in range(0, len(val), 7))


def test_a_missing_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install nestling\[demo\]"):
        PhotoTiles("train")


def test_an_unknown_photograph_lists_the_known_ones():
    with pytest.raises(UserError, match=r"moon.*astronaut"):
        photograph("moon")
    assert photograph("retina").shape == (1411, 1411, 3)


@pytest.mark.slow
def test_raw_pixels_reach_about_a_quarter(train, val):
    """20 nearest neighbours by cosine of the pixels, votes weighted by exp(similarity / 0.07)."""

    def unit(source):
        pixels = (
            np.stack([source.load(i) for i in range(len(source))]).reshape(len(source), -1).astype(np.float32)
        )
        return pixels / np.linalg.norm(pixels, axis=1, keepdims=True)

    similarity = unit(val) @ unit(train).T
    nearest = np.argsort(-similarity, axis=1, kind="stable")[:, :20]
    weights = np.exp(np.take_along_axis(similarity, nearest, axis=1) / 0.07)
    votes = np.zeros((len(val), 19))
    np.add.at(votes, (np.arange(len(val))[:, None], train.labels[nearest]), weights)
    assert abs((votes.argmax(axis=1) == val.labels).mean() - 0.24) < 0.04


def test_the_list_names_only_what_the_packages_say_is_free():
    """Each docstring states a licence; the two of scikit-learn stand in its own README."""
    from skimage.data import _fetchers

    by_file = {"clock_motion": "clock", "ihc": "immunohistochemistry"}
    for photo in photo_tiles.PHOTOGRAPHS:
        if photo.package == "skimage":
            text = getattr(_fetchers, by_file.get(photo.name, photo.name)).__doc__
            assert any(word in text for word in ("CC0", "ublic domain", "copyright restrictions")), photo.name
