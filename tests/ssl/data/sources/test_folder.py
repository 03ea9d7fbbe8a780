import json
import os
import pickle

import numpy as np
import pytest
from planting import plant

from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.sources.folder import EXTENSIONS, Folder
from nestling.ssl.errors import UserError


def names_in(folder):
    return [os.path.relpath(folder.path(i), folder.name) for i in range(len(folder))]


def by_parts(path):
    return os.fsencode(path).split(b"/")


def plant_run(folder):
    """What a run of nestling leaves behind, a picture among it."""
    plant(folder, "picture.png", "checkpoints/step_1/x.png")
    for name in ("config.yaml", "log.jsonl"):
        (folder / name).write_text("")
    (folder / "environment.json").write_text(json.dumps({"nestling": "1.0"}))


def test_a_flat_folder_has_no_labels(tmp_path):
    folder = Folder(plant(tmp_path, "b.png", "a.JPG", "c.JpEg"))
    assert names_in(folder) == ["a.JPG", "b.png", "c.JpEg"]
    assert folder.labels is None
    assert folder.class_names is None
    assert folder.passed_over == ""
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


def test_hidden_and_foreign_entries_are_left_out_and_counted(tmp_path):
    root = plant(
        tmp_path, "a/1.png", "b/1.png", ".cache/1.png", "__MACOSX/a/1.png", "a/._1.png", "a/.x/1.png"
    )
    (tmp_path / "empty").mkdir()
    (tmp_path / "a" / "notes.txt").write_text("no image")
    (tmp_path / "b" / "more.txt").write_text("no image")
    folder = Folder(root)
    assert names_in(folder) == ["a/1.png", "b/1.png"]
    assert folder.class_names == ["a", "b"]
    assert folder.passed_over == "4 hidden entries, 2 other files such as a/notes.txt"


def test_a_hidden_root_is_still_read(tmp_path):
    assert len(Folder(plant(tmp_path / ".images", "1.png"))) == 1


def test_the_order_is_that_of_the_parts_of_the_path(tmp_path):
    names = ["a/z.png", "a-b.png", "a.png", "a/b/2.png", "a/b.png", "a/c/1.png", "B/1.png", "a b/1.png"]
    names += ["a\x01/1.png", "é/1.png", os.fsdecode(b"\xfe/1.png"), "a/b-c/1.png", "a/b0.png"]
    assert names_in(Folder(plant(tmp_path, *names))) == sorted(names, key=by_parts)


def test_the_order_does_not_depend_on_the_file_system(tmp_path, monkeypatch):
    root = plant(tmp_path / "images", *(f"c{i % 3}/{i}.png" for i in range(20)))
    expected = names_in(Folder(root, cache=str(tmp_path / "one")))
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
    assert names_in(Folder(root, cache=str(tmp_path / "two"))) == expected == sorted(expected)


def test_undecodable_names_survive(tmp_path):
    name = os.fsdecode(b"\xff\xfe.png")
    folder = Folder(plant(tmp_path, name, "猫 é.png"))
    assert {os.path.basename(folder.path(i)) for i in range(2)} == {name, "猫 é.png"}
    assert folder.load(0).shape == folder.load(1).shape == (2, 3, 3)


def test_undecodable_folders_are_classes(tmp_path):
    name = os.fsdecode(b"\xff")
    folder = Folder(plant(tmp_path, f"{name}/1.png", "b/1.png"))
    assert folder.class_names == ["b", name]
    assert pickle.loads(pickle.dumps(folder)).class_names == ["b", name]


def test_loops_of_links_end_and_multiply_nothing(tmp_path):
    root = plant(tmp_path, "a/1.png", "b/2.png")
    os.symlink(tmp_path, tmp_path / "a" / "root")
    os.symlink(tmp_path / "b", tmp_path / "a" / "to_b")
    os.symlink(tmp_path / "a", tmp_path / "b" / "to_a")
    folder = Folder(root)
    assert names_in(folder) == ["a/1.png", "b/2.png"]
    assert folder.passed_over == "3 links to images already counted"


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
    assert folder.passed_over == ""


def test_a_real_file_goes_before_links_to_it(tmp_path):
    root = plant(tmp_path, "m/1.png", "m/2.png")
    for link in ("a.png", "m/0.png", "z.png"):
        os.symlink(tmp_path / "m" / "1.png", tmp_path / link)
    folder = Folder(root)
    assert names_in(folder) == ["m/1.png", "m/2.png"]
    assert folder.passed_over == "3 links to images already counted"


def test_of_several_links_to_one_file_the_first_counts(tmp_path):
    plant(tmp_path, "store/1.png")
    plant(tmp_path, "view/k.png")
    for link in ("z.png", "c.png", "x.png"):
        os.symlink(tmp_path / "store" / "1.png", tmp_path / "view" / link)
    folder = Folder(str(tmp_path / "view"))
    assert names_in(folder) == ["c.png", "k.png"]
    assert folder.passed_over == "2 links to images already counted"


def test_a_folder_with_nothing_but_links_to_counted_images_is_no_class(tmp_path):
    root = plant(tmp_path, "b/1.png", "c/2.png")
    (tmp_path / "a").mkdir()
    os.symlink(tmp_path / "b" / "1.png", tmp_path / "a" / "1.png")
    folder = Folder(root)
    assert folder.class_names == ["b", "c"]
    assert folder.labels.tolist() == [0, 1]


def test_hard_links_are_images_of_their_own(tmp_path):
    root = plant(tmp_path, "1.png")
    os.link(tmp_path / "1.png", tmp_path / "2.png")
    os.symlink(tmp_path / "1.png", tmp_path / "0.png")
    assert names_in(Folder(root)) == ["1.png", "2.png"]


def test_broken_links_are_counted_and_the_first_three_named(tmp_path):
    root = plant(tmp_path, "a/1.png")
    for name in ("b.png", "a/x.jpg"):
        os.symlink(tmp_path / "nowhere", tmp_path / name)
    assert Folder(root).passed_over == "2 broken links (b.png, a/x.jpg)"
    for name in ("c.png", "loop"):
        os.symlink(tmp_path / name, tmp_path / name)
    assert Folder(root).passed_over == "4 broken links (b.png, c.png, loop, …)"


def test_any_tree_with_links_gives_each_file_that_can_be_reached_once(tmp_path):
    for seed in range(15):
        random = np.random.default_rng(seed)
        root = tmp_path / str(seed)
        folders = [root / "in", root / "out"]
        for _ in range(12):
            folders.append(folders[random.integers(len(folders))] / str(random.integers(10)))
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        files = [folder / f"{random.integers(20)}.png" for folder in folders for _ in range(2)]
        for file in files:
            file.touch()
        for target in (*random.choice(folders, 8), *random.choice(files, 8)):
            link = folders[random.integers(len(folders))] / f"l{random.integers(100)}{target.suffix}"
            if not os.path.lexists(link):
                link.symlink_to(target)
        found = names_in(Folder(str(root / "in")))
        real = [os.path.realpath(root / "in" / name) for name in found]
        assert sorted(real) == sorted(reachable(root / "in")), seed
        assert found == sorted(found, key=by_parts), seed


def reachable(root):
    """The real paths of all images below, by asking for each entry's real path and nothing else."""
    images, seen, waiting = set(), set(), [os.path.realpath(root)]
    while waiting:
        folder = waiting.pop()
        if folder not in seen:
            seen.add(folder)
            for name in os.listdir(folder):
                path = os.path.realpath(os.path.join(folder, name))
                if os.path.isdir(path):
                    waiting.append(path)
                elif name.endswith(".png"):
                    images.add(path)
    return images


def test_folders_of_runs_are_left_out_and_named(tmp_path):
    root = plant(tmp_path, "images/1.png")
    plant_run(tmp_path / "runs" / "a")
    folder = Folder(root)
    assert names_in(folder) == ["images/1.png"]
    assert folder.passed_over == "1 folder of a run (runs/a)"


def test_a_folder_with_another_programs_environment_is_no_run(tmp_path):
    root = plant(tmp_path, "1.png")
    (tmp_path / "environment.json").write_text("{}")
    assert len(Folder(root)) == 1


def test_a_run_itself_is_refused(tmp_path):
    plant_run(tmp_path)
    with pytest.raises(UserError, match=r"data\.train=.* is the folder of a run"):
        Folder(str(tmp_path))


def test_arrays_are_images_only_where_channels_are_unchanged(tmp_path):
    root = plant(tmp_path, "1.png")
    np.save(tmp_path / "labels.npy", np.zeros(3))
    assert names_in(Folder(root)) == ["1.png"]
    assert names_in(Folder(root, Decoder(mode="unchanged"))) == ["1.png", "labels.npy"]


def test_no_image_says_what_was_looked_for_and_what_was_there(tmp_path):
    with pytest.raises(UserError, match=r"data\.train=.*looked for .*\.png.*saw no file at all"):
        Folder(str(tmp_path))
    (tmp_path / "a.heic").write_bytes(b"x")
    (tmp_path / "b.txt").write_bytes(b"x")
    with pytest.raises(UserError, match=r"saw 2 other files, e\.g\. a\.heic$"):
        Folder(str(tmp_path))
    (tmp_path / "c.png").symlink_to("nowhere")
    plant(tmp_path, ".hidden/1.png")
    expected = r"saw 1 hidden entry, 2 other files, e\.g\. a\.heic, 1 broken link \(c\.png\)$"
    with pytest.raises(UserError, match=expected):
        Folder(str(tmp_path))


def test_a_missing_folder_or_a_file_is_refused_by_its_key(tmp_path):
    with pytest.raises(UserError, match=r"data\.val=.*found nothing"):
        Folder(str(tmp_path / "gone"), key="data.val")
    plant(tmp_path, "a.png")
    with pytest.raises(UserError, match=r"data\.train=.*found a file"):
        Folder(str(tmp_path / "a.png"))


def test_every_extension_is_found_in_any_case(tmp_path):
    for extension in EXTENSIONS:
        (tmp_path / f"a{extension}").touch()
        (tmp_path / f"b{extension.upper()}").touch()
    assert len(Folder(str(tmp_path))) == 2 * len(EXTENSIONS)


def test_folders_survive_pickling(tmp_path):
    folder = Folder(plant(tmp_path, "a/1.png", "b/1.png", "b/2.png"))
    again = pickle.loads(pickle.dumps(folder))
    assert names_in(again) == names_in(folder)
    assert again.labels.tolist() == [0, 1, 1]
    assert again.name == folder.name
    assert np.array_equal(again.load(1), folder.load(1))
