"""Which source a setting means, and which images of it are used."""

import logging

import numpy as np
import pytest
from PIL import Image

from nestling.ssl.config import Config, Data
from nestling.ssl.data.sources.arrays import ImageArray
from nestling.ssl.data.sources.folder import Folder
from nestling.ssl.data.sources.lists import ImageList
from nestling.ssl.data.sources.opening import open_pair, open_source
from nestling.ssl.data.survey import warn_of_shallow, warn_of_small
from nestling.ssl.errors import UserError


def plant(root, *sides):
    root.mkdir(exist_ok=True)
    for number, side in enumerate(sides):
        Image.new("RGB", (side, 40)).save(root / f"{number:02d}.png")
    return root


def opened(spec, **settings):
    return open_source(Data(train=str(spec), **settings), "train")


def test_each_kind_is_known_by_its_ending_or_by_being_a_folder(tmp_path):
    folder = plant(tmp_path / "images", 8, 9)
    assert isinstance(opened(folder), Folder)
    (tmp_path / "list.txt").write_text("images/00.png\n")
    assert isinstance(opened(tmp_path / "list.txt"), ImageList)
    np.save(tmp_path / "array.npy", np.zeros((3, 8, 8), np.uint8))
    assert isinstance(opened(tmp_path / "array.npy"), ImageArray)


def test_a_folder_that_is_named_like_a_list_is_a_folder(tmp_path):
    assert isinstance(opened(plant(tmp_path / "images.txt", 8)), Folder)


@pytest.mark.parametrize(
    ("name", "found"), [("nowhere", "found nothing"), ("a.pdf", "found a file of another kind")]
)
def test_what_is_neither_is_refused_naming_all_that_would_work(tmp_path, name, found):
    (tmp_path / "a.pdf").touch()
    with pytest.raises(
        UserError, match=rf"^data\.train=.*{name}: {found}.*\.parquet.*\.npz.*torchvision:NAME"
    ):
        opened(tmp_path / name)


def test_images_below_the_least_size_are_left_out_and_counted(tmp_path):
    folder = plant(tmp_path / "images", 8, 32, 16, 99)
    (folder / "02.png").write_bytes(b"no image")  # judged when it is read
    source = opened(folder, min_size=32)
    assert [source.path(i)[-6:] for i in range(len(source))] == ["01.png", "02.png", "03.png"]
    assert source.passed_over == "1 images below data.min_size=32"


def test_a_least_size_that_leaves_nothing_is_refused(tmp_path):
    folder = plant(tmp_path / "images", 8, 32)
    with pytest.raises(UserError, match=r"data\.min_size=41 leaves none of the 2 images .* is 32 pixels"):
        opened(folder, min_size=41)


def test_the_pair_is_the_named_or_the_held_out_or_none(tmp_path):
    for name in ("a", "b"):
        plant(tmp_path / name, *[8] * 10)
    cfg = Config(data=Data(train=str(tmp_path)))
    assert [len(source) for source in open_pair(cfg)] == [18, 2]
    cfg.data.val = str(tmp_path / "a")
    assert [len(source) for source in open_pair(cfg)] == [20, 10]
    cfg.data.val, cfg.data.holdout = None, 0
    assert open_pair(cfg)[1] is None
    assert open_pair(Config(data=Data(train=str(tmp_path / "a"))))[1] is None


def test_images_smaller_than_the_crops_are_warned_of_once_with_their_count(tmp_path, caplog):
    cfg = Config(data=Data(train=str(plant(tmp_path / "images", 1, 8, 32, 40, 50))))
    cfg.views.local_size = [48, 32]
    with caplog.at_level(logging.WARNING, "nestling"):
        warn_of_small(open_source(cfg.data, "train"), cfg)
    (message,) = caplog.messages
    assert message.startswith("2 of 5 images")
    assert "views.local_size=32, the smallest 1 pixels" in message
    assert "data.min_size=32" in message


def test_images_as_large_as_the_crops_are_not_warned_of(tmp_path, caplog):
    cfg = Config(data=Data(train=str(plant(tmp_path / "images", 32, 40))))
    cfg.views.local_size = [32]
    warn_of_small(open_source(cfg.data, "train"), cfg)
    assert caplog.messages == []


def test_deep_images_that_would_keep_few_gray_levels_are_warned_of(tmp_path, caplog):
    (tmp_path / "images").mkdir()
    for number in range(3):
        ramp = np.linspace(0, 4095, 64 * 64).astype(np.uint16).reshape(64, 64)
        Image.fromarray(ramp).save(tmp_path / "images" / f"{number}.png")
    cfg = Config(data=Data(train=str(tmp_path / "images"), mode="gray"))
    warn_of_shallow(cfg)
    (message,) = caplog.messages
    assert message.startswith("images of uint16 hold values from 0 to 4095")
    assert "data.window" in message
    cfg.data.window = [0, 4095]
    warn_of_shallow(cfg)
    assert len(caplog.messages) == 1


def test_plain_images_are_not_warned_of(tmp_path, caplog):
    warn_of_shallow(Config(data=Data(train=str(plant(tmp_path / "images", 8)))))
    assert caplog.messages == []
