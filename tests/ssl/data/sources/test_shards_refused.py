"""Tar shards that can't serve are refused in words."""

import gzip
import json
import os
import shutil
import sys

import pytest
from shard_writing import write_images, write_tar

from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.sources.shards import TarShards
from nestling.ssl.errors import UserError

DECODER = Decoder()


def cut_in_content(path):
    os.truncate(path, 700)


def cut_between_members(path):
    os.truncate(path, 1024)


def cut_in_header(path):
    os.truncate(path, 1200)


def damage_header(path):
    with open(path, "r+b") as file:
        file.seek(1024)
        file.write(b"\xff" * 512)


def empty(path):
    os.truncate(path, 0)


def no_tar(path):
    with open(path, "wb") as file:
        file.write(b"plain text " * 200)


@pytest.mark.parametrize(
    "damage", [cut_in_content, cut_between_members, cut_in_header, damage_header, empty, no_tar]
)
def test_a_damaged_shard_is_named(tmp_path, damage):
    write_images(tmp_path / "a.tar", 0, 2)
    shard = write_images(tmp_path / "b.tar", 0, 2)
    damage(shard)
    with pytest.raises(UserError, match=rf"data\.val: the shard {shard} is cut off or .*write it anew"):
        TarShards(str(tmp_path / "*.tar"), DECODER, "data.val")


def test_shards_joined_by_cat_are_refused(tmp_path):
    first, second = (write_images(tmp_path / name, 0, 2) for name in ("a.tar", "b.tar"))
    with open(first, "ab") as joined, open(second, "rb") as further:
        joined.write(bytes(3_000_000))
        joined.write(further.read())
    with pytest.raises(UserError, match=r"a\.tar goes on behind its end mark at byte \d+, as `cat a\.tar b"):
        TarShards(first, DECODER)


def test_zeros_behind_the_end_mark_mean_nothing(tmp_path):
    shard = write_images(tmp_path / "a.tar", 0, 2)
    with open(shard, "ab") as padded:
        padded.write(bytes(3_000_000))
    assert len(TarShards(shard, DECODER)) == 2


def test_a_compressed_shard_is_refused_in_words(tmp_path):
    shard = write_images(tmp_path / "a.tar", 0, 1)
    with open(shard, "rb") as file, gzip.open(tmp_path / "b.tar", "wb") as packed:
        shutil.copyfileobj(file, packed)
    with pytest.raises(UserError, match=r"b\.tar is compressed by gzip.*unpack it"):
        TarShards(str(tmp_path / "b.tar"), DECODER)


def test_what_is_not_there_is_named(tmp_path):
    write_images(tmp_path / "a-0.tar", 0, 1)
    with pytest.raises(UserError, match=r"a-1\.tar can't be read: No such file"):
        TarShards(str(tmp_path / "a-{0..1}.tar"), DECODER)
    with pytest.raises(UserError, match=r"data\.train=.*b-\*\.tar: no file has such a name"):
        TarShards(str(tmp_path / "b-*.tar"), DECODER)
    for spec in ("https://host/a-{0..1}.tar", "pipe:cat a-0.tar"):
        with pytest.raises(UserError, match="shards are read from files; download them"):
            TarShards(spec, DECODER)
    with pytest.raises(UserError, match=r"a-0\.tar/x.*can't be read: Not a directory"):
        TarShards(str(tmp_path / "a-0.tar/x.tar"), DECODER)


def test_shards_without_images_are_refused(tmp_path):
    shard = write_tar(tmp_path / "a.tar", [("a.txt", b"words"), ("b.json", json.dumps({}).encode())])
    with pytest.raises(
        UserError, match=r"no images in 1 shards; looked for .*\.jpg.*but 2 samples without an image"
    ):
        TarShards(shard, DECODER)
    with pytest.raises(UserError, match=r"no images in 1 shards; looked for [^,]*$"):
        TarShards(write_tar(tmp_path / "b.tar", []), DECODER)


def test_braces_without_webdataset_say_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "webdataset", None)
    monkeypatch.setitem(sys.modules, "webdataset.shardlists", None)
    write_images(tmp_path / "a-0.tar", 0, 2)
    with pytest.raises(UserError, match=r"pip install nestling\[webdataset\]"):
        TarShards(str(tmp_path / "a-{0..1}.tar"), DECODER)
    assert len(TarShards(str(tmp_path / "a-*.tar"), DECODER)) == 2
