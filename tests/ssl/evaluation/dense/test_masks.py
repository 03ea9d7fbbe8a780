"""Ids of masks are read as they stand, and images and masks find each other."""

import numpy as np
import pytest
from dense_subjects import write_scenes
from PIL import Image

from nestling.ssl.config import Data
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.dense.folder import MaskedImages, class_names
from nestling.ssl.evaluation.dense.masks import read_mask, resized_ids, write_mask


def test_ids_are_read_as_they_stand(tmp_path):
    ids = np.arange(12, dtype=np.uint8).reshape(3, 4)
    Image.fromarray(ids).save(tmp_path / "gray.png")
    write_mask(
        tmp_path / "palette.png", ids, [value for number in range(12) for value in (number * 20, 0, 9)]
    )
    Image.fromarray(ids > 5).save(tmp_path / "one_bit.png")
    assert (read_mask(tmp_path / "gray.png") == ids).all()
    assert (read_mask(tmp_path / "palette.png") == ids).all()
    assert (read_mask(tmp_path / "one_bit.png") == (ids > 5)).all()


@pytest.mark.parametrize("bits", [2, 4])
def test_gray_of_few_bits_is_not_spread_over_all_values(tmp_path, bits):
    import struct
    import zlib

    ids = np.array([[0, 1, 2, 3], [3, 2, 1, 0]], np.uint8)
    packed = np.packbits(np.unpackbits(ids[..., None], axis=2)[..., -bits:].reshape(2, -1), axis=1)
    rows = b"".join(b"\0" + row.tobytes() for row in packed)

    def chunk(kind, content):
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", 4, 2, bits, 0, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    (tmp_path / "mask.png").write_bytes(b"\x89PNG\r\n\x1a\n" + parts)
    assert (read_mask(tmp_path / "mask.png") == ids).all()


def test_a_resized_mask_holds_no_new_id_and_keeps_halves_and_doubles():
    ids = np.array([[0, 9, 9, 200], [4, 4, 7, 7]], np.uint8)
    double = resized_ids(ids, 4, 8)
    assert (double == ids.repeat(2, 0).repeat(2, 1)).all()
    assert (resized_ids(double, 2, 4) == ids).all()
    assert set(resized_ids(ids, 5, 7).ravel()) <= set(ids.ravel())


def test_pairs_match_by_path_and_classes_are_counted_or_named(tmp_path):
    pairs = MaskedImages(str(write_scenes(tmp_path / "scenes")), Data(), "data.train")
    assert len(pairs) == 4
    for index in range(4):
        assert pairs.masks[index] == pairs.images.path(index).replace("/images/", "/masks/")
    pair, failures = pairs.read(2)
    assert pair.image.shape == (40, 56, 3)
    assert set(np.unique(pair.mask)) == {0, 1, 2, 255}
    assert failures == []
    assert class_names(pairs) == ["0", "1", "2"]
    (tmp_path / "scenes/classes.txt").write_text("ground\nred\ngreen\nnever\n")
    assert class_names(pairs) == ["ground", "red", "green", "never"]
    with pytest.raises(UserError, match=r"classes.txt names 4 classes and num_classes=3"):
        class_names(pairs, 3)
    from_one = MaskedImages(pairs.name, Data(), "data.train", zero_is_ignored=True)
    assert set(np.unique(from_one.mask(2))) == {0, 1, 255}
    assert from_one.count_classes() == 2


def broken(root, how):
    if how == "no_masks":
        (root / "masks").rename(root / "labels")
    elif how == "lonely":
        (root / "masks/00/0000.png").rename(root / "masks/00/else.png")
    elif how == "size":
        Image.fromarray(np.zeros((5, 6), np.uint8)).save(root / "masks/00/0000.png")
    elif how == "twice":
        Image.open(root / "images/00/0000.png").save(root / "images/00/0000.jpg")
    elif how == "colours":
        Image.fromarray(np.zeros((40, 56, 3), np.uint8)).save(root / "masks/00/0000.png")
    elif how == "text":
        (root / "masks/00/0000.png").write_text("no image")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no_masks", r"data\.train=.* holds no folder masks"),
        ("lonely", r"1 images without a mask \(00/0000\), 1 masks without an image \(00/else\)"),
        ("size", r"masks/00/0000\.png has 6 x 5 pixels and its image .*images/00/0000\.png 56 x 40"),
        ("twice", r"same name but for the ending: 00/0000"),
        ("colours", r"masks/00/0000\.png is PNG of mode RGB"),
        ("text", r"masks/00/0000\.png can't be read"),
    ],
)
def test_a_wrong_folder_is_refused_by_name(tmp_path, how, message):
    root = write_scenes(tmp_path, count=2)
    broken(root, how)
    with pytest.raises(UserError, match=message):
        MaskedImages(str(root), Data(), "data.train").read(0)


def test_an_id_beyond_the_classes_is_refused_by_name(tmp_path):
    pairs = MaskedImages(str(write_scenes(tmp_path, count=1)), Data(), "data.val")
    with pytest.raises(UserError, match=r"0000\.png holds class 2, and there are 2 classes \(0 to 1\)"):
        pairs.check_ids(0, pairs.mask(0), 2)
