"""Tar shards: the same samples as webdataset finds, by offset, in any process."""

import gc
import gzip
import io
import json
import logging
import multiprocessing
import os
import pickle
import shutil
import sys
import tarfile
import threading
import warnings

import numpy as np
import pytest
from PIL import Image

from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.failures import UnreadableError
from nestling.ssl.data.sources.shards import MAX_OPEN, TarShards
from nestling.ssl.errors import UserError

DECODER = Decoder()


def pixels_of(number, size=(6, 9)):
    return np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)


def encoded(pixels, kind="png"):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def write_tar(path, members):
    """A shard of (name, content) pairs; returns its path as text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return str(path)


def write_images(path, first, count):
    return write_tar(
        path, [(f"{number:04d}.png", encoded(pixels_of(number))) for number in range(first, first + count)]
    )


@pytest.fixture
def written(tmp_path):
    """Three shards by webdataset's own writer: 0-3, 4-7, 8-9."""
    import webdataset

    pattern = str(tmp_path / "set-%04d.tar")
    with webdataset.ShardWriter(pattern, maxcount=4, verbose=0) as writer:
        for number in range(10):
            key = f"part_{number % 2}/{number:05d}"
            writer.write(
                {"__key__": key, "png": encoded(pixels_of(number)), "txt": "words", "cls": 3 * number % 5}
            )
    return tmp_path


def read_by_webdataset(spec):
    """All samples; the files that it leaves open are closed here, unsaid."""
    import webdataset

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        samples = list(webdataset.WebDataset(spec, shardshuffle=False, empty_check=False).decode("rgb8"))
        gc.collect()
    return samples


def test_samples_keys_and_labels_are_those_of_webdataset(written):
    spec = str(written / "set-{0000..0002}.tar")
    theirs = read_by_webdataset(spec)
    ours = TarShards(spec, DECODER)
    assert len(ours) == len(theirs) == 10
    assert ours.class_names == ["0", "1", "2", "3", "4"]
    for index, sample in enumerate(theirs):
        assert np.array_equal(ours.load(index), sample["png"])
        assert ours.path(index) == f"{sample['__url__']}/{sample['__key__']}.png"
        assert int(ours.class_names[ours.labels[index]]) == sample["cls"]
    assert ours.blocks.tolist() == [4, 8, 10]
    assert ours.passed_over == ""


def test_braces_and_stars_name_the_same_shards(written):
    by_braces = TarShards(str(written / "set-{0000..0002}.tar"), DECODER)
    by_star = TarShards(str(written / "set-*.tar"), DECODER)
    paths = [by_braces.path(index) for index in range(10)]
    assert [by_star.path(index) for index in range(10)] == paths
    one = TarShards(str(written / "set-0001.tar"), DECODER)
    assert [one.path(index) for index in range(len(one))] == paths[4:8]


def test_a_name_with_braces_that_is_there_means_itself(tmp_path):
    shard = write_images(tmp_path / "a{0..1}.tar", 0, 2)
    assert len(TarShards(shard, DECODER)) == 2


def test_paths_may_be_relative(tmp_path, monkeypatch):
    write_images(tmp_path / "a.tar", 0, 2)
    monkeypatch.chdir(tmp_path)
    source = TarShards("a.tar", DECODER)
    monkeypatch.chdir("/")
    assert source.path(1) == f"{tmp_path}/a.tar/0001.png"
    assert np.array_equal(source.load(1), pixels_of(1))


def test_the_image_of_a_sample_is_its_first_in_any_case(tmp_path):
    members = [
        ("a.txt", b"words"),
        ("a.PNG", encoded(pixels_of(0))),
        ("a.second.png", encoded(pixels_of(1))),
        ("b.json", b"{}"),
        ("__meta__/d.png", b"webdataset's own"),
        ("._a.png", b"as macOS adds"),
        ("no_extension", b""),
        ("c.left.jpg", encoded(pixels_of(2), "jpeg")),
    ]
    source = TarShards(write_tar(tmp_path / "a.tar", members), DECODER)
    assert [os.path.basename(source.path(index)) for index in range(len(source))] == ["a.PNG", "c.left.jpg"]
    assert np.array_equal(source.load(0), pixels_of(0))
    assert source.passed_over == "1 samples without an image, 1 further images of samples"
    assert source.labels is None


def test_arrays_are_images_where_channels_stay_unchanged(tmp_path):
    bands = np.arange(6 * 5 * 4, dtype=np.uint8).reshape(6, 5, 4)
    buffer = io.BytesIO()
    np.save(buffer, bands)
    shard = write_tar(tmp_path / "a.tar", [("a.npy", buffer.getvalue())])
    assert np.array_equal(TarShards(shard, Decoder(mode="unchanged", channels=4)).load(0), bands)
    with pytest.raises(UserError, match=r"no images in 1 shards; looked for .*1 samples without an image"):
        TarShards(shard, DECODER)


@pytest.mark.parametrize(
    ("labels", "names", "numbers"),
    [
        ([("cls", b"10"), ("cls", b" 9\n"), ("cls", b"10")], ["9", "10"], [1, 0, 1]),
        ([("json", b'{"label": 1}'), ("json", b'{"cls": 0}'), ("cls", b"1")], ["0", "1"], [1, 0, 1]),
        (
            [("json", b'{"label": "owl"}'), ("json", b'{"label": "cat"}'), ("cls", b"owl")],
            ["cat", "owl"],
            [1, 0, 1],
        ),
    ],
)
def test_labels_are_in_cls_or_json(tmp_path, labels, names, numbers):
    members = []
    for number, (kind, content) in enumerate(labels):
        members += [(f"{number}.{kind}", content), (f"{number}.png", encoded(pixels_of(number)))]
    source = TarShards(write_tar(tmp_path / "a.tar", members), DECODER)
    assert source.class_names == names
    assert source.labels.tolist() == numbers


@pytest.mark.parametrize(
    "broken", [b"", b"{", b"[1]", b'{"label": [1, 2]}', b'{"label": true}', b'{"text": 1}']
)
def test_labels_that_some_samples_lack_are_left_out_and_said(tmp_path, broken):
    image = encoded(pixels_of(0))
    members = [("a.png", image), ("a.json", b'{"label": 1}'), ("b.png", image), ("b.json", broken)]
    source = TarShards(write_tar(tmp_path / "a.tar", members), DECODER)
    assert source.labels is None
    assert source.class_names is None
    assert source.passed_over == "the labels of 1 samples, as 1 have none"


def test_a_name_may_hold_any_bytes(tmp_path):
    folder = tmp_path / os.fsdecode(b"\xff folder")
    name = os.fsdecode(b"a/\xfe\xff caf\xc3\xa9") + ".png"
    source = TarShards(write_tar(folder / "s.tar", [(name, encoded(pixels_of(3)))]), DECODER)
    assert os.fsencode(source.path(0)) == os.fsencode(folder) + b"/s.tar/a/\xfe\xff caf\xc3\xa9.png"
    assert np.array_equal(source.load(0), pixels_of(3))


def test_long_names_are_read_in_both_formats_of_tar(tmp_path):
    name = "/".join(["folder" * 10] * 4) + "/a.png"
    for kind in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        file = tmp_path / f"{kind}.tar"
        with tarfile.open(file, "w", format=kind) as tar:
            info = tarfile.TarInfo(name)
            info.size = len(encoded(pixels_of(0)))
            tar.addfile(info, io.BytesIO(encoded(pixels_of(0))))
        source = TarShards(str(file), DECODER)
        assert source.path(0) == f"{file}/{name}"
        assert np.array_equal(source.load(0), pixels_of(0))


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


def test_a_pickled_source_is_small_and_the_same(tmp_path):
    members = [
        (f"{number:06d}.{kind}", content)
        for number in range(3000)
        for kind, content in (("png", b""), ("cls", b"7"))
    ]
    source = TarShards(write_tar(tmp_path / "a.tar", members), DECODER)
    pickled = pickle.dumps(source)
    assert len(pickled) < 2000
    copy = pickle.loads(pickled)
    assert copy.path(2999) == source.path(2999)
    assert np.array_equal(copy.labels, source.labels)
    assert np.array_equal(copy.blocks, source.blocks)
    assert (len(copy), copy.name, copy.class_names) == (3000, source.name, ["7"])


def load_all(source):
    """In another process: every image, in an order of its own."""
    order = np.random.default_rng(os.getpid()).permutation(len(source))
    return all(np.array_equal(source.load(index), pixels_of(index)) for index in order)


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_processes_read_at_once_from_files_opened_before(tmp_path, start):
    write_images(tmp_path / "a.tar", 0, 20)
    write_images(tmp_path / "b.tar", 20, 20)
    source = TarShards(str(tmp_path / "*.tar"), DECODER)
    assert load_all(source)
    with multiprocessing.get_context(start).Pool(2) as pool:
        assert pool.map(load_all, [source] * 4) == [True] * 4


def open_in(folder):
    """How many files below a folder this process has open."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:  # of the listing itself
            continue
    return sum(link.startswith(str(folder)) and link.endswith(".tar") for link in links)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files by /proc")
def test_few_shards_are_open_at_once_and_none_in_the_end(tmp_path):
    for number in range(MAX_OPEN + 5):
        write_images(tmp_path / f"{number:03d}.tar", number, 1)
    source = TarShards(str(tmp_path / "*.tar"), DECODER)
    assert load_all(source)
    assert load_all(source)
    assert open_in(tmp_path) == MAX_OPEN
    del source
    assert open_in(tmp_path) == 0


def test_an_image_that_cannot_be_decoded_is_named(tmp_path):
    source = TarShards(write_tar(tmp_path / "a.tar", [("x/a.png", b"no image")]), DECODER)
    with pytest.raises(UnreadableError) as caught:
        source.load(0)
    assert caught.value.path == f"{tmp_path}/a.tar/x/a.png"
    assert not caught.value.io


@pytest.mark.parametrize("change", ["removed", "cut"])
def test_a_shard_that_is_lost_while_running_is_an_error_of_reading(tmp_path, change):
    shard = write_images(tmp_path / "a.tar", 0, 3)
    source = TarShards(shard, DECODER)
    os.unlink(shard) if change == "removed" else os.truncate(shard, 1100)
    with pytest.raises(UnreadableError) as caught:
        source.load(2)
    assert caught.value.io
    assert source.sides(np.array([2])).tolist() == [0]


def test_a_shard_that_comes_back_in_a_moment_is_read(tmp_path):
    shard = write_images(tmp_path / "a.tar", 0, 3)
    source = TarShards(shard, DECODER)
    os.rename(shard, tmp_path / "away")
    back = threading.Timer(0.1, os.rename, (tmp_path / "away", shard))
    back.start()
    assert np.array_equal(source.load(2), pixels_of(2))
    back.join()


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
