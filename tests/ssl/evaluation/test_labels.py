"""Images on both sides are found whatever their paths say; classes are shown on one line."""

import logging
import os
import tracemalloc

import numpy as np
import pytest
from planting import plant
from shard_writing import write_images

from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.sources.base import Subset, holdout
from nestling.ssl.data.sources.folder import Folder
from nestling.ssl.data.sources.lists import ImageList
from nestling.ssl.data.sources.shards import TarShards
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.labels import matched_labels, refuse_shared_files, shared_files, unknown_classes


def listed(file, *names):
    file.write_text("\n".join(names))
    return ImageList(str(file))


def test_images_apart_are_not_refused(tmp_path):
    names = ("a/1.png", "b/1.png", "1.png")  # the same on both sides
    train, val = (Folder(plant(tmp_path / side, *names)) for side in ("train", "val"))
    refuse_shared_files(train, val)


def test_validation_images_behind_a_link_are_found(tmp_path):
    train = Folder(plant(tmp_path / "train", "a/1.png", "b/1.png"))
    (tmp_path / "val").symlink_to("train")
    message = rf"2 files are both in data\.train=.*, such as {tmp_path}/train/a/1\.png; "
    with pytest.raises(UserError, match=message):
        refuse_shared_files(train, Folder(str(tmp_path / "val")))


def test_one_class_behind_a_link_is_found(tmp_path):
    train = Folder(plant(tmp_path / "train", "a/1.png", "b/1.png"))
    plant(tmp_path / "val", "a/1.png")
    (tmp_path / "val" / "b").symlink_to("../train/b")
    with pytest.raises(UserError, match=r"1 files are both in .*train/b/1\.png; "):
        refuse_shared_files(train, Folder(str(tmp_path / "val")))


def test_a_list_and_a_folder_that_share_a_file_are_found(tmp_path):
    folder = Folder(plant(tmp_path / "train", "a/1.png", "2.png", "b/3.png"))
    for name in ("train/a/1.png", f"{tmp_path}/train/2.png", "train/../train/b/3.png"):
        val = listed(tmp_path / "list.txt", "other.png", name)
        with pytest.raises(UserError, match=rf"1 files are both in .*{os.path.basename(name)}; "):
            refuse_shared_files(folder, val)
    refuse_shared_files(folder, listed(tmp_path / "list.txt", "1.png", "train/b/2.png", "a/1.png"))


def test_a_list_of_plain_names_is_found_in_its_folder(tmp_path):
    folder = Folder(plant(tmp_path, "1.png", "2.png"))
    with pytest.raises(UserError, match=r"1 files are both in .*2\.png; "):
        refuse_shared_files(folder, listed(tmp_path / "list.txt", "3.png", "2.png"))


def test_many_files_are_told_apart_by_all_of_their_names(tmp_path):
    """More than are hashed in one go, some in the one and some in the other."""
    names = [f"{number % 7}/{number}.png" for number in range(20_000)]
    train = listed(tmp_path / "train.txt", *names[:15_000])
    with pytest.raises(UserError, match=r"^5000 files are both .*/4/10000\.png; "):
        refuse_shared_files(train, listed(tmp_path / "val.txt", *reversed(names[10_000:])))
    refuse_shared_files(train, listed(tmp_path / "val.txt", *names[15_000:]))


def test_shards_behind_a_link_are_found(tmp_path):
    train = TarShards(write_images(tmp_path / "train" / "a.tar", 0, 3), Decoder())
    (tmp_path / "link").symlink_to("train")
    with pytest.raises(UserError, match=r"3 files are both in .*train/a\.tar/0000\.png; "):
        refuse_shared_files(train, TarShards(str(tmp_path / "link" / "a.tar"), Decoder()))
    val = TarShards(write_images(tmp_path / "val" / "a.tar", 0, 3), Decoder())
    refuse_shared_files(train, val)


def test_shared_files_have_one_number_that_every_process_gives(tmp_path):
    folder = Folder(plant(tmp_path / "train", "a/1.png", "a/2.png", "b/3.png", "b/4.png"))
    names = ("train/b/3.png", "other.png", f"{tmp_path}/train/a/1.png", "train/b/3.png", "other.png")
    numbers = shared_files(folder, listed(tmp_path / "list.txt", *names))
    assert numbers is not None
    assert [part.tolist() for part in numbers] == [[0, 1, 2, 3], [2, 5, 0, 2, 5]]
    assert shared_files(*holdout(folder, 0.5, 0)) is None


def test_unknown_classes_are_counted(tmp_path):
    train = Folder(plant(tmp_path / "train", "a/1.png", "b/1.png"))
    val = Folder(plant(tmp_path / "val", "a/1.png", "c/1.png", "c/2.png", "d/1.png"))
    assert unknown_classes(val, matched_labels(train, val)[1]) == {"c": 2, "d": 1}


def test_parts_of_one_source_are_compared_by_number(tmp_path):
    folder = Folder(plant(tmp_path, *(f"{c}/{i}.png" for c in "ab" for i in range(10))))
    refuse_shared_files(*holdout(folder, 0.3, 0))
    with pytest.raises(UserError, match=r"2 files are both in .*a/4\.png; "):
        refuse_shared_files(Subset(folder, [0, 1, 4, 5]), Subset(folder, [2, 3, 5, 4]))


def test_a_part_of_a_folder_and_another_opening_of_it_are_compared_by_file(tmp_path):
    root = plant(tmp_path, *(f"{i}.png" for i in range(9)))
    train = Subset(Folder(root), [0, 2, 4])
    refuse_shared_files(train, Subset(Folder(root), [1, 3]))
    with pytest.raises(UserError, match=r"1 files are both in .*/4\.png; "):
        refuse_shared_files(train, Subset(Folder(root), [3, 4]))


def test_the_search_takes_little_memory(tmp_path):
    count = 20_000
    train, val = (
        listed(
            tmp_path / f"{side}.txt", *(f"{side}/folder_{i % 100}/image_{i:08d}.png" for i in range(count))
        )
        for side in ("train", "val")
    )
    tracemalloc.start()
    refuse_shared_files(train, val)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * count  # as Python strings in a set, 150 bytes each


def test_names_are_shown_on_one_line(tmp_path, caplog):
    train = Folder(plant(tmp_path / "t\nrain", "a/1.png", "\nb/1.png"))
    flat = Folder(plant(tmp_path / "f\nlat", "1.png"))
    other = Folder(plant(tmp_path / "other", "\nx/1.png", "y/1.png"))
    mixed = Folder(plant(tmp_path / "mixed", "\nx/1.png", "a/2.png"))
    for refused in (
        lambda: matched_labels(train, flat),
        lambda: matched_labels(train, other),
        lambda: refuse_shared_files(train, train),
    ):
        with pytest.raises(UserError) as refusal:
            refused()
        assert str(refusal.value).isprintable()
        assert "knn.every" not in str(refusal.value)  # which is pretraining's to say
    with caplog.at_level(logging.WARNING, "nestling"):
        labels = matched_labels(train, mixed)[1]
    assert np.array_equal(np.sort(labels), [-1, 1])
    assert r": \nx" in caplog.text


def test_a_class_that_filtering_has_emptied_in_training_is_as_if_it_were_not_there(tmp_path, caplog):
    train = Folder(plant(tmp_path / "train", "a/1.png", "b/1.png", "c/1.png"))
    val = Folder(plant(tmp_path / "val", "a/1.png", "b/1.png", "c/1.png"))
    _, labels, names = matched_labels(Subset(train, [0, 2]), val)
    assert labels.tolist() == [0, -1, 2]
    assert names == ["a", "b", "c"]
    assert "of 1 classes that data.train lacks: b" in caplog.text
