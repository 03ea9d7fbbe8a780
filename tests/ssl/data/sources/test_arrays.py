"""Images in one array of a .npy or .npz file."""

import pickle

import numpy as np
import pytest

from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.sources.arrays import ImageArray
from nestling.ssl.errors import UserError

RGB, GRAY = Decoder(), Decoder(mode="gray", channels=1)


def numbers(*shape, dtype=np.uint8):
    return np.random.default_rng(0).integers(0, 256, shape).astype(dtype)


def saved(path, images):
    np.save(path, images)
    return str(path)


def saved_all(path, **arrays):
    np.savez_compressed(path, **arrays)
    return str(path)


@pytest.mark.parametrize("shape", [(5, 6, 7), (5, 6, 7, 1), (5, 6, 7, 3), (5, 3, 6, 7)])
def test_each_layout_gives_the_same_images(tmp_path, shape):
    images = numbers(*shape)
    source = ImageArray(saved(tmp_path / "a.npy", images), "train", RGB)
    last = np.moveaxis(images, 1, -1) if shape[1] == 3 else images.reshape(5, 6, 7, -1)
    assert len(source) == 5
    for index in range(5):
        assert np.array_equal(source.load(index), np.broadcast_to(last[index], (6, 7, 3)))
    assert source.sides(np.array([4, 0])).tolist() == [6, 6]
    assert source.path(3) == f"{tmp_path}/a.npy/3"
    assert source.labels is None


def test_numbers_are_scaled_as_those_of_files(tmp_path):
    images = np.linspace(0, 65535, 4 * 6 * 7).reshape(4, 6, 7).astype(np.uint16)
    source = ImageArray(saved(tmp_path / "a.npy", images), "train", GRAY)
    expected = np.round(images / 257).astype(np.uint8)
    assert all(np.array_equal(source.load(index)[:, :, 0], expected[index]) for index in range(4))


def test_many_channels_are_kept_where_they_are_asked_for(tmp_path):
    images = numbers(2, 6, 7, 5)
    source = ImageArray(saved(tmp_path / "a.npy", images), "train", Decoder(mode="unchanged", channels=5))
    assert np.array_equal(source.load(1), images[1])


@pytest.mark.parametrize(
    "labels", [np.array([7, -1, 10, 7]), np.array([[7], [-1], [10], [7]], dtype=np.int8)]
)
def test_labels_stand_beside_the_images(tmp_path, labels):
    file = saved_all(tmp_path / "a.npz", images=numbers(4, 6, 7), labels=labels)
    source = ImageArray(file, "train", GRAY)
    assert [int(source.class_names[label]) for label in source.labels] == labels.reshape(-1).tolist()
    assert source.class_names == [str(name) for name in sorted(set(labels.reshape(-1).tolist()))]
    assert source.path(2) == f"{tmp_path}/a.npz/images/2"


@pytest.mark.parametrize(
    ("there", "split", "chosen"),
    [
        (("train", "val", "test"), "train", "train"),
        (("train", "val", "test"), "val", "val"),
        (("train", "test"), "val", "test"),
    ],
)
def test_splits_are_named_as_in_medmnist(tmp_path, there, split, chosen):
    arrays = {}
    for number, name in enumerate(there):
        arrays[f"{name}_images"] = numbers(3, 6, 7) // 2 + number
        arrays[f"{name}_labels"] = np.full((3, 1), number, dtype=np.uint8)
    source = ImageArray(saved_all(tmp_path / "a.npz", **arrays), split, GRAY)
    assert np.array_equal(source.load(1)[:, :, 0], arrays[f"{chosen}_images"][1])
    assert source.class_names == [str(there.index(chosen))]
    assert source.path(0).endswith(f"a.npz/{chosen}_images/0")


def test_several_labels_per_image_are_left_out_and_said(tmp_path):
    file = saved_all(tmp_path / "a.npz", images=numbers(4, 6, 7), labels=np.zeros((4, 14), dtype=np.uint8))
    source = ImageArray(file, "train", GRAY)
    assert source.labels is None
    assert source.passed_over == "the labels of shape (4, 14), as an image has several"


@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_a_pickled_source_leaves_the_pixels_in_their_file(tmp_path, kind):
    images = numbers(200, 16, 16)
    write = saved if kind == "npy" else saved_all
    file = (
        write(tmp_path / f"a.{kind}", images) if kind == "npy" else write(tmp_path / "a.npz", images=images)
    )
    source = ImageArray(file, "train", GRAY)
    pickled = pickle.dumps(source)
    assert len(pickled) < 2000
    copy = pickle.loads(pickled)
    assert np.array_equal(copy.load(150), source.load(150))
    assert copy.sides(np.array([1])).tolist() == [16]


def test_a_large_npy_is_mapped_not_read(tmp_path):
    images = np.lib.format.open_memmap(
        tmp_path / "a.npy", "w+", np.uint8, (2**14, 2**10, 2**10)
    )  # 16 GiB of holes
    images[-1] = 7
    source = ImageArray(str(tmp_path / "a.npy"), "train", GRAY)
    assert source.load(2**14 - 1).min() == 7
    assert source.load(0).max() == 0


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (numbers(5), r"shape \(5,\); images have \(N, H, W\)"),
        (numbers(2, 2, 2, 2, 3), r"shape \(2, 2, 2, 2, 3\)"),
        (numbers(0, 6, 7), r"shape \(0, 6, 7\)"),
        (numbers(2, 6, 7, 5), r"shape \(2, 6, 7, 5\), where data.mode=rgb takes 1 or 3 or 4 channels"),
        (numbers(2, 6, 7, dtype=complex), r"type complex128; images hold whole numbers or floats"),
        (np.full((2, 3, 3), "a"), r"type <U1"),
    ],
)
def test_an_array_that_holds_no_images_is_refused(tmp_path, images, message):
    with pytest.raises(UserError, match=rf"data\.val=.*a\.npy.*{message}"):
        ImageArray(saved(tmp_path / "a.npy", images), "val", RGB, "data.val")


def test_channels_other_than_asked_for_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"\(2, 6, 7, 3\), where data\.in_chans=5 takes 5 channels"):
        ImageArray(
            saved(tmp_path / "a.npy", numbers(2, 6, 7, 3)), "train", Decoder(mode="unchanged", channels=5)
        )


def test_python_objects_are_never_unpickled(tmp_path):
    file = tmp_path / "a.npy"
    np.save(file, np.array([[[print]]], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match="it holds Python objects; write it by"):
        ImageArray(str(file), "train", RGB)
    np.savez(tmp_path / "a.npz", images=np.array([[[print]]], dtype=object))
    with pytest.raises(UserError, match="it holds Python objects; write it by"):
        ImageArray(str(tmp_path / "a.npz"), "train", RGB)


@pytest.mark.parametrize("name", ["a.npy", "a.npz"])
@pytest.mark.parametrize("content", [b"", b"some text", b"PK\x03\x04 half a zip", b"\x93NUMPY\x01\x00"])
def test_a_damaged_file_is_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(
        UserError, match=rf"data\.train={tmp_path}/{name} can't be read as an array: .*numpy\.save"
    ):
        ImageArray(str(tmp_path / name), "train", RGB)


def test_a_missing_file_is_named(tmp_path):
    for name in ("a.npy", "a.npz"):
        with pytest.raises(UserError, match=rf"{name} can't be read: No such file"):
            ImageArray(str(tmp_path / name), "train", RGB)


def test_missing_images_name_what_is_there(tmp_path):
    file = saved_all(tmp_path / "a.npz", x=numbers(2, 6, 7), y=numbers(2))
    with pytest.raises(
        UserError, match=r"holds the arrays x, y; name the images val_images or test_images or images"
    ):
        ImageArray(file, "val", GRAY)


@pytest.mark.parametrize("labels", [np.zeros(3, int), np.zeros(4), np.zeros((2, 2, 1), int), np.array(1)])
def test_labels_of_another_kind_are_refused(tmp_path, labels):
    file = saved_all(tmp_path / "a.npz", images=numbers(4, 6, 7), labels=labels)
    with pytest.raises(UserError, match=r"labels has shape .*; 4 images have whole numbers of shape \(4,\)"):
        ImageArray(file, "train", GRAY)
