"""torchvision's data sets by name, from files in the formats of the sets themselves."""

import hashlib
import json
import pickle
import shlex
import struct
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from torchvision import datasets

from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.failures import UnreadableError
from nestling.ssl.data.sources.torchvision_sets import TorchvisionSet
from nestling.ssl.errors import UserError

RGB, GRAY = Decoder(), Decoder(mode="gray", channels=1)


def opened(name, split, root, decoder=RGB):
    return TorchvisionSet(name, split, decoder, f"data.{split}", str(root))


def idx(array):
    """The format of MNIST's files: type 8 (unsigned bytes), the sizes, the numbers."""
    sizes = b"".join(struct.pack(">i", size) for size in array.shape)
    return struct.pack(">HBB", 0, 8, array.ndim) + sizes + array.tobytes()


@pytest.fixture
def fashion(tmp_path):
    """FashionMNIST of 7 training and 4 test images; returns the root and the arrays."""
    arrays = {}
    raw = tmp_path / "FashionMNIST/raw"
    raw.mkdir(parents=True)
    for number, (split, count) in enumerate({"train": 7, "t10k": 4}.items()):
        random = np.random.default_rng(number)
        images = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = random.integers(0, 10, count, dtype=np.uint8)
        (raw / f"{split}-images-idx3-ubyte").write_bytes(idx(images))
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(idx(labels))
        arrays[split] = images, labels
    return tmp_path, arrays


def save(path, number=0, size=(9, 6)):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.mark.parametrize(("split", "files"), [("train", "train"), ("val", "t10k")])
def test_a_set_with_a_switch_between_train_and_test(fashion, split, files):
    root, arrays = fashion
    images, labels = arrays[files]
    source = opened("FashionMNIST", split, root, GRAY)
    assert len(source) == len(images)
    assert all(np.array_equal(source.load(index)[:, :, 0], images[index]) for index in range(len(images)))
    assert np.array_equal(source.labels, labels)
    assert source.class_names == datasets.FashionMNIST.classes
    assert source.path(1) == f"torchvision:FashionMNIST/{split}/1"
    assert np.array_equal(
        opened("FashionMNIST", split, root).load(2), np.repeat(images[2][:, :, None], 3, axis=2)
    )


def test_a_name_is_taken_in_any_case(fashion):
    source = opened("fashionmnist", "train", fashion[0])
    assert source.name == "torchvision:FashionMNIST"
    assert np.array_equal(source.load(0), opened("FashionMNIST", "train", fashion[0]).load(0))


@pytest.mark.parametrize(("split", "count"), [("train", 3), ("val", 4)])
def test_emnist_is_read_by_class(tmp_path, split, count):
    raw = tmp_path / "EMNIST/raw"
    raw.mkdir(parents=True)
    for number, part in enumerate(("train", "test")):
        images = np.full((3 + number, 28, 28), number, dtype=np.uint8)
        (raw / f"emnist-byclass-{part}-images-idx3-ubyte").write_bytes(idx(images))
        labels = np.arange(3 + number, dtype=np.uint8)
        (raw / f"emnist-byclass-{part}-labels-idx1-ubyte").write_bytes(idx(labels))
    source = opened("EMNIST", split, tmp_path, GRAY)
    assert len(source) == count
    assert source.load(0).max() == count - 3
    assert len(source.class_names) == 62


def test_the_default_root_lies_in_the_cache(fashion, tmp_path, monkeypatch):
    root, _ = fashion
    (tmp_path / "torchvision").mkdir()
    (root / "FashionMNIST").rename(tmp_path / "torchvision/FashionMNIST")
    assert len(TorchvisionSet("FashionMNIST", "train", RGB, cache=str(tmp_path))) == 7
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    with pytest.raises(UserError, match=f"not in data.root={tmp_path}/user/nestling/torchvision,"):
        TorchvisionSet("FashionMNIST", "train", RGB)


def test_a_pickled_source_leaves_the_pixels_in_their_files(fashion):
    source = opened("FashionMNIST", "val", fashion[0])
    pickled = pickle.dumps(source)
    assert len(pickled) < 3000
    copy = pickle.loads(pickled)
    assert np.array_equal(copy.load(3), source.load(3))
    assert np.array_equal(copy.labels, source.labels)


def test_cifar10_by_its_checksums(tmp_path, monkeypatch):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (6, 3, 32, 32), dtype=np.uint8)
    content = pickle.dumps({"data": images.reshape(6, -1), "labels": [3, 1, 4, 1, 5, 9]})
    names = pickle.dumps({"label_names": [f"kind {number}" for number in range(10)]})
    (folder / "data_batch_1").write_bytes(content)
    (folder / "batches.meta").write_bytes(names)
    with pytest.raises(UserError, match=r"is not in data\.root=.*, or damaged there; download it by"):
        opened("CIFAR10", "train", tmp_path)  # the content is not that of the true set
    digests = [hashlib.md5(part).hexdigest() for part in (content, names)]
    monkeypatch.setattr(datasets.CIFAR10, "train_list", [["data_batch_1", digests[0]]])
    monkeypatch.setattr(datasets.CIFAR10, "test_list", [])
    meta = {"filename": "batches.meta", "key": "label_names", "md5": digests[1]}
    monkeypatch.setattr(datasets.CIFAR10, "meta", meta)
    source = opened("CIFAR10", "train", tmp_path)
    assert all(np.array_equal(source.load(index), images[index].transpose(1, 2, 0)) for index in range(6))
    assert source.labels.tolist() == [3, 1, 4, 1, 5, 9]
    assert source.class_names[9] == "kind 9"


def test_a_set_of_files_with_train_and_val(tmp_path):
    for split, count in (("train", 3), ("val", 2)):
        for wnid in ("n01440764", "n02102040"):
            for number in range(count):
                save(tmp_path / "imagenette2" / split / wnid / f"{number}.JPEG", number)
    source = opened("Imagenette", "val", tmp_path)
    assert source.path(2) == f"{tmp_path}/imagenette2/val/n02102040/0.JPEG"
    assert np.array_equal(source.load(2), RGB.file(source.path(2)))
    assert source.labels.tolist() == [0, 0, 1, 1]
    assert source.class_names == ["tench, Tinca tinca", "English springer, English springer spaniel"]
    assert source.sides(np.array([0, 3])).tolist() == [6, 6]
    assert len(pickle.loads(pickle.dumps(source))) == 4
    assert len(opened("Imagenette", "train", tmp_path)) == 6


def test_files_of_a_set_are_read_as_all_files_are(tmp_path):
    """torchvision's own loader would leave the image lying on its side."""
    file = tmp_path / "imagenette2/train/n01440764/0.JPEG"
    save(file, size=(9, 6))
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.open(file).save(file, exif=exif)
    save(tmp_path / "imagenette2/val/n01440764/0.JPEG")
    assert opened("Imagenette", "train", tmp_path).load(0).shape == (6, 9, 3)
    assert np.asarray(datasets.Imagenette(tmp_path, "train")[0][0]).shape == (9, 6, 3)


def test_a_set_without_val_is_judged_by_test(tmp_path):
    meta = {"cake": ["cake/1", "cake/2"], "pie": ["pie/3"]}
    (tmp_path / "food-101/meta").mkdir(parents=True)
    for split in ("train", "test"):
        content = json.dumps(meta if split == "test" else {"cake": ["cake/9"], "pie": []})
        (tmp_path / f"food-101/meta/{split}.json").write_text(content)
    for name in ("cake/1", "cake/2", "pie/3", "cake/9"):
        save(tmp_path / f"food-101/images/{name}.jpg")
    source = opened("Food101", "val", tmp_path)
    assert [source.path(index).rpartition("images/")[2] for index in range(3)] == [
        "cake/1.jpg",
        "cake/2.jpg",
        "pie/3.jpg",
    ]
    assert source.labels.tolist() == [0, 0, 1]
    assert source.class_names == ["cake", "pie"]
    assert len(opened("Food101", "train", tmp_path)) == 1


def test_a_set_whose_split_is_called_image_set(tmp_path):
    base = tmp_path / "VOCdevkit/VOC2012"
    (base / "ImageSets/Segmentation").mkdir(parents=True)
    for split, name in (("train", "one"), ("val", "two")):
        (base / f"ImageSets/Segmentation/{split}.txt").write_text(f"{name}\n")
        save(base / f"JPEGImages/{name}.jpg")
        save(base / f"SegmentationClass/{name}.png")
    source = opened("VOCSegmentation", "val", tmp_path)
    assert (len(source), source.labels) == (1, None)
    assert source.path(0) == f"{base}/JPEGImages/two.jpg"


def test_a_set_without_parts_can_only_be_trained_on(tmp_path):
    for name in ("Forest/a.jpg", "River/b.jpg"):
        save(tmp_path / "eurosat/2750" / name)
    source = opened("EuroSAT", "train", tmp_path)
    assert source.class_names == ["Forest", "River"]
    with pytest.raises(UserError, match=r"no part for validation; leave data\.val null"):
        opened("EuroSAT", "val", tmp_path)


def test_generated_images_are_decoded_too():
    source = TorchvisionSet("FakeData", "train", RGB)
    assert (len(source), source.labels, source.load(5).shape) == (1000, None, (224, 224, 3))


def test_an_unreadable_file_is_named(tmp_path):
    for split in ("train", "val"):
        save(tmp_path / f"imagenette2/{split}/n01440764/0.JPEG")
    file = tmp_path / "imagenette2/train/n01440764/0.JPEG"
    file.write_bytes(b"no image")
    source = opened("Imagenette", "train", tmp_path)
    with pytest.raises(UnreadableError) as caught:
        source.load(0)
    assert caught.value.path == str(file)


def test_a_missing_set_says_how_to_get_it(tmp_path):
    root = tmp_path / "my 'own' sets"
    with pytest.raises(UserError) as caught:
        opened("FashionMNIST", "val", root)
    said, _, line = str(caught.value).partition("; download it by: ")
    assert said == f"data.val=torchvision:FashionMNIST is not in data.root={root}, or damaged there"
    command, flag, code = shlex.split(line)
    assert (command, flag) == ("python", "-c")
    assert code.endswith(", train=False, download=True)")
    shown = code.replace("torchvision.datasets.FashionMNIST(", "print(dict(") + ")"
    done = subprocess.run(
        [sys.executable, "-c", shown.replace("import torchvision; ", "")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str({"root": str(root), "train": False, "download": True})
    assert not root.exists()


def test_a_missing_set_that_must_be_fetched_by_hand_says_so(tmp_path):
    with pytest.raises(UserError, match=r"put its files there as torchvision's page on it says"):
        opened("ImageNet", "train", tmp_path)


def test_sets_that_download_by_default_do_not(tmp_path):
    with pytest.raises(UserError, match=r"SEMEION is not in data\.root"):
        opened("SEMEION", "train", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "Fashion-Mnist",
            r"data\.train=torchvision:Fashion-Mnist: torchvision has no .*did you mean FashionMNIST",
        ),
        ("Foo", r"no data set of that name"),
        ("UCF101", r"needs annotation_path, frames_per_clip besides its name"),
        ("EMNIST", r"not in data\.root.*download it by.*split=.*byclass.*train=True, download=True"),
        ("wrap_dataset_for_transforms_v2", r"no data set of that name"),
    ],
)
def test_a_name_that_does_not_work_is_refused(tmp_path, name, message):
    with pytest.raises(UserError, match=message):
        opened(name, "train", tmp_path)


def test_videos_are_refused(tmp_path):
    (tmp_path / "MovingMNIST").mkdir()
    np.save(tmp_path / "MovingMNIST/mnist_test_seq.npy", np.zeros((20, 3, 64, 64), dtype=np.uint8))
    with pytest.raises(UserError, match="holds no images but Tensor"):
        opened("MovingMNIST", "train", tmp_path)


def test_a_damaged_set_is_named(fashion):
    root, _ = fashion
    (root / "FashionMNIST/raw/train-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03")
    with pytest.raises(UserError, match=r"torchvision:FashionMNIST can't be opened in data\.root="):
        opened("FashionMNIST", "train", root)


def test_classes_of_one_name_are_told_apart(tmp_path, monkeypatch):
    """As ImageNet's two kinds of crane: labels are matched by name."""
    for wnid in ("n01440764", "n02102040", "n02979186"):
        save(tmp_path / f"imagenette2/train/{wnid}/0.JPEG")
    names = {"n01440764": ("crane",), "n02102040": ("crane",), "n02979186": ("owl",)}
    monkeypatch.setattr(datasets.Imagenette, "_WNID_TO_CLASS", names)
    assert opened("Imagenette", "train", tmp_path).class_names == ["crane (0)", "crane (1)", "owl"]
