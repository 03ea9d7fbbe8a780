import os
import pickle

import numpy as np
import pytest
from PIL import Image

from nestling.ssl.config import Config
from nestling.ssl.data.packed import PackedPaths
from nestling.ssl.data.sources import Folder, Subset, holdout, open_pair, open_source
from nestling.ssl.errors import UserError


def plant(root, *names):
    """Write a small image under each name; its red value is its place in `names`."""
    for number, name in enumerate(names):
        path = os.path.join(root, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        Image.new("RGB", (3, 2), (number, 0, 0)).save(path, format="PNG")
    return str(root)


def names_in(folder):
    return [os.path.relpath(folder.path(i), folder.name) for i in range(len(folder))]


def test_a_flat_folder_has_no_labels(tmp_path):
    folder = Folder(plant(tmp_path, "b.png", "a.JPG", "c.JpEg"))
    assert names_in(folder) == ["a.JPG", "b.png", "c.JpEg"]
    assert folder.labels is None
    assert folder.class_names is None
    assert folder.load(1)[0, 0].tolist() == [0, 0, 0]


def test_class_folders_give_labels_at_any_depth(tmp_path):
    folder = Folder(plant(tmp_path, "dog/x/2.png", "cat/1.png", "dog/0.png"))
    assert names_in(folder) == ["cat/1.png", "dog/0.png", "dog/x/2.png"]
    assert folder.class_names == ["cat", "dog"]
    assert folder.labels.tolist() == [0, 1, 1]
    assert folder.labels.dtype == np.int64


def test_images_at_the_root_or_a_single_subfolder_make_no_classes(tmp_path):
    assert Folder(plant(tmp_path / "mixed", "a/1.png", "b/1.png", "0.png")).labels is None
    assert Folder(plant(tmp_path / "single", "images/1.png", "images/b/2.png")).labels is None


def test_empty_hidden_and_foreign_entries_are_no_classes(tmp_path):
    root = plant(
        tmp_path, "a/1.png", "b/1.png", ".cache/1.png", "__MACOSX/a/1.png", "a/._1.png", "a/.x/1.png"
    )
    (tmp_path / "empty").mkdir()
    (tmp_path / "a" / "notes.txt").write_text("no image")
    folder = Folder(root)
    assert names_in(folder) == ["a/1.png", "b/1.png"]
    assert folder.class_names == ["a", "b"]


def test_a_hidden_root_is_still_read(tmp_path):
    assert len(Folder(plant(tmp_path / ".images", "1.png"))) == 1


def test_loops_of_links_end_and_multiply_nothing(tmp_path):
    root = plant(tmp_path, "a/1.png", "b/2.png")
    os.symlink(tmp_path, tmp_path / "a" / "root")
    os.symlink(tmp_path / "b", tmp_path / "a" / "to_b")
    os.symlink(tmp_path / "a", tmp_path / "b" / "to_a")
    os.symlink(tmp_path / "nowhere.png", tmp_path / "b" / "broken.png")
    assert names_in(Folder(root)) == ["a/1.png", "b/2.png"]


def test_linked_folders_and_files_are_followed(tmp_path):
    plant(tmp_path / "store", "x/1.png", "y/2.png")
    view = tmp_path / "view"
    view.mkdir()
    os.symlink(tmp_path / "store" / "x", view / "a")
    (view / "b").mkdir()
    os.symlink(tmp_path / "store" / "y" / "2.png", view / "b" / "linked.png")
    folder = Folder(str(view))
    assert names_in(folder) == ["a/1.png", "b/linked.png"]
    assert folder.labels.tolist() == [0, 1]


def test_the_order_does_not_depend_on_the_file_system(tmp_path, monkeypatch):
    root = plant(tmp_path, *(f"c{i % 3}/{i}.png" for i in range(20)))
    expected = names_in(Folder(root))
    real = os.scandir

    class Reversed:
        def __init__(self, path):
            with real(path) as entries:
                self.entries = sorted(entries, key=lambda entry: entry.name, reverse=True)

        def __enter__(self):
            return iter(self.entries)

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(os, "scandir", Reversed)
    assert names_in(Folder(root)) == expected == sorted(expected)


def test_undecodable_names_survive(tmp_path):
    name = os.fsdecode(b"\xff\xfe.png")
    folder = Folder(plant(tmp_path, name, "猫 é.png"))
    assert {os.path.basename(folder.path(i)) for i in range(2)} == {name, "猫 é.png"}
    assert folder.load(0).shape == folder.load(1).shape == (2, 3, 3)


def test_no_image_says_what_was_looked_for_and_what_was_there(tmp_path):
    with pytest.raises(UserError, match=r"data\.train=.*looked for .*\.png.*saw no file at all"):
        Folder(str(tmp_path))
    (tmp_path / "a.heic").write_bytes(b"x")
    (tmp_path / "b.txt").write_bytes(b"x")
    with pytest.raises(UserError, match=r"saw 2 other files, e\.g\. a\.heic"):
        Folder(str(tmp_path))


def test_a_missing_folder_or_a_file_is_refused_by_its_key(tmp_path):
    with pytest.raises(UserError, match=r"data\.val=.*found nothing"):
        open_source(str(tmp_path / "gone"), "val")
    plant(tmp_path, "a.png")
    with pytest.raises(UserError, match=r"data\.train=.*found a file"):
        open_source(str(tmp_path / "a.png"), "train")


def test_sources_survive_pickling(tmp_path):
    folder = Folder(plant(tmp_path, "a/1.png", "b/1.png", "b/2.png"))
    again = pickle.loads(pickle.dumps(Subset(folder, [2, 0])))
    assert again.path(0) == folder.path(2)
    assert again.labels.tolist() == [1, 0]
    assert np.array_equal(again.load(1), folder.load(0))


def test_packed_paths_are_a_sequence():
    paths = ["a", "", "猫/é", os.fsdecode(b"\xff"), "b" * 300]
    packed = PackedPaths(paths)
    assert list(packed) == paths
    assert packed[-1] == paths[-1]
    with pytest.raises(IndexError):
        packed[5]
    assert len(PackedPaths([])) == 0


def test_holdout_splits_exactly_and_alike_every_time(tmp_path):
    folder = Folder(plant(tmp_path, *(f"{c}/{i}.png" for c in "ab" for i in range(20))))
    train, val = holdout(folder, 0.1, seed=3)
    assert (len(train), len(val)) == (36, 4)
    assert sorted([*train.indices, *val.indices]) == list(range(40))
    assert np.array_equal(holdout(folder, 0.1, seed=3)[1].indices, val.indices)
    assert any(not np.array_equal(holdout(folder, 0.1, seed=s)[1].indices, val.indices) for s in range(3))
    assert val.labels.tolist() == folder.labels[val.indices].tolist()


def test_an_image_more_moves_at_most_one_other_out_of_the_holdout(tmp_path):
    folder = Folder(plant(tmp_path, *(f"{i:03d}.png" for i in range(41))))
    before = set(holdout(Subset(folder, range(40)), 0.2, seed=0)[1].indices.tolist())
    after = set(holdout(folder, 0.2, seed=0)[1].indices.tolist())
    assert len(before - after) <= 1


def test_holdout_keeps_one_image_on_either_side(tmp_path):
    folder = Folder(plant(tmp_path, "1.png", "2.png"))
    assert [len(part) for part in holdout(folder, 0.01, 0)] == [1, 1]
    assert [len(part) for part in holdout(folder, 0.9, 0)] == [1, 1]
    assert [len(part) for part in holdout(folder, 0, 0)] == [2, 0]
    with pytest.raises(UserError, match=r"data\.holdout"):
        holdout(Subset(folder, [0]), 0.1, 0)


def test_open_pair_takes_the_named_the_held_out_or_no_validation_images(tmp_path):
    cfg = Config()
    cfg.data.train = plant(tmp_path / "train", *(f"{c}/{i}.png" for c in "ab" for i in range(5)))
    train, val = open_pair(cfg)
    assert (len(train), len(val)) == (9, 1)
    cfg.data.val = plant(tmp_path / "val", "a/1.png", "b/1.png")
    assert [len(source) for source in open_pair(cfg)] == [10, 2]
    cfg.data.val, cfg.data.train = None, plant(tmp_path / "flat", "1.png", "2.png")
    train, val = open_pair(cfg)
    assert len(train) == 2
    assert val is None
