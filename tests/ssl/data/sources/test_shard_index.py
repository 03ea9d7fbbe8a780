"""The index of tar shards: kept for as long as no shard changes."""

import io
import logging
import os
import pickle
import tarfile

import numpy as np
import pytest
from shard_writing import encoded, pixels_of, write_images, write_tar

from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.sources.shards import TarShards

DECODER = Decoder()


def test_unchanged_shards_are_not_read_again(tmp_path):
    shard = write_images(tmp_path / "a.tar", 0, 3)
    os.utime(shard, (1e9, 1e9))  # long ago: a change within the clock's grain would not show
    first = TarShards(shard, DECODER, cache=str(tmp_path / "cache"))
    before = os.stat(shard)
    with open(shard, "r+b") as file:  # the headers go, what the system says of the file stays
        file.write(bytes(512))
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    again = TarShards(shard, DECODER, cache=str(tmp_path / "cache"))
    assert [again.path(index) for index in range(3)] == [first.path(index) for index in range(3)]
    assert np.array_equal(again.load(2), pixels_of(2))


def test_a_changed_shard_is_read_again(tmp_path):
    shard = write_images(tmp_path / "a.tar", 0, 3)
    os.utime(shard, (1e9, 1e9))
    assert len(TarShards(shard, DECODER)) == 3
    write_images(tmp_path / "a.tar", 0, 5)
    assert len(TarShards(shard, DECODER)) == 5


def test_a_shard_that_changes_while_clocks_stand_still_is_read_again(tmp_path):
    shard = write_images(tmp_path / "a.tar", 0, 3)
    assert TarShards(shard, DECODER).path(0).endswith("0000.png")
    before = os.stat(shard)
    write_images(tmp_path / "a.tar", 3, 3)
    os.truncate(shard, before.st_size)  # both are filled up to whole records, so nothing is cut off
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert TarShards(shard, DECODER).path(0).endswith("0003.png")


@pytest.mark.parametrize("damage", ["facts.json", "offsets.npy", "names.npy"])
@pytest.mark.parametrize("how", ["emptied", "cut", "removed"])
def test_a_damaged_index_is_made_anew(tmp_path, damage, how):
    shard = write_images(tmp_path / "a.tar", 0, 3)
    os.utime(shard, (1e9, 1e9))
    TarShards(shard, DECODER, cache=str(tmp_path / "cache"))
    file = next((tmp_path / "cache").rglob(damage))
    if how == "removed":
        file.unlink()
    else:
        os.truncate(file, 0 if how == "emptied" else file.stat().st_size - 3)
    for _ in range(2):
        source = TarShards(shard, DECODER, cache=str(tmp_path / "cache"))
        assert np.array_equal(source.load(2), pixels_of(2))
    assert file.stat().st_size > 0


def test_a_cache_that_cannot_be_written_is_said_and_done_without(tmp_path, caplog):
    shard = write_images(tmp_path / "a.tar", 0, 3)
    (tmp_path / "file").write_text("no folder")
    with caplog.at_level(logging.WARNING, "nestling"):
        source = TarShards(shard, DECODER, cache=str(tmp_path / "file"))
    assert "data.cache names a folder that can be written" in caplog.text
    copy = pickle.loads(pickle.dumps(source))
    assert np.array_equal(copy.load(1), pixels_of(1))


def test_shorter_sides_come_from_headers_even_late_ones(tmp_path):
    large = np.random.default_rng(0).integers(0, 256, (300, 200, 3), dtype=np.uint8)
    members = [
        ("a.png", encoded(pixels_of(0))),
        ("b.tif", encoded(large, "tiff")),  # its header lies behind 180,000 bytes of pixels
        ("c.png", b"none"),
    ]
    assert TarShards(write_tar(tmp_path / "a.tar", members), DECODER).sides(np.array([1, 0, 2])).tolist() == [
        200,
        6,
        0,
    ]


def add_link(tar, name, target, kind=tarfile.LNKTYPE):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    tar.addfile(info)


def test_a_hard_link_is_the_file_that_it_names(tmp_path):
    """As GNU tar packs two names of one file."""
    (tmp_path / "0.png").write_bytes(encoded(pixels_of(0)))
    (tmp_path / "0.cls").write_text("7")
    os.link(tmp_path / "0.png", tmp_path / "1.png")
    os.link(tmp_path / "0.cls", tmp_path / "1.cls")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("0.png", "0.cls", "1.png", "1.cls"):
            tar.add(tmp_path / name, name)
    with tarfile.open(tmp_path / "a.tar") as tar:
        assert [member.islnk() for member in tar] == [False, False, True, True]
    source = TarShards(str(tmp_path / "a.tar"), DECODER)
    assert [os.path.basename(source.path(index)) for index in range(len(source))] == ["0.png", "1.png"]
    assert np.array_equal(source.load(1), pixels_of(0))
    assert (source.class_names, source.passed_over) == (["7"], "")


def test_links_that_lead_nowhere_are_counted(tmp_path):
    shard = write_images(tmp_path / "a.tar", 0, 2)
    with tarfile.open(shard, "a") as tar:
        add_link(tar, "2.png", "gone.png")
        add_link(tar, "3.png", "0000.png", tarfile.SYMTYPE)
    source = TarShards(shard, DECODER)
    assert len(source) == 2
    assert source.passed_over == "2 links that lead to no earlier file of their shard"


def test_files_stored_with_holes_are_counted(tmp_path):
    shard = write_images(tmp_path / "a.tar", 0, 2)
    with tarfile.open(shard, "a", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("2.png")
        info.pax_headers = {"GNU.sparse.map": "0,1", "GNU.sparse.size": "5000"}
        info.size = 1
        tar.addfile(info, io.BytesIO(b"x"))
    source = TarShards(shard, DECODER)
    assert len(source) == 2
    assert source.passed_over == "1 files stored with holes"
