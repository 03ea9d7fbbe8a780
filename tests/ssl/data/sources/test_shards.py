"""Tar shards: the same samples as webdataset finds, by offset, in any process."""

import gc
import io
import multiprocessing
import os
import pickle
import tarfile
import threading
import warnings

import numpy as np
import pytest
from shard_writing import encoded, pixels_of, write_images, write_tar

from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.failures import UnreadableError
from nestling.ssl.data.sources.shards import MAX_OPEN, TarShards
from nestling.ssl.errors import UserError

DECODER = Decoder()


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
    assert not caught.value.transient


@pytest.mark.parametrize("change", ["removed", "cut"])
def test_a_shard_that_is_lost_while_running_is_an_error_of_reading(tmp_path, change):
    shard = write_images(tmp_path / "a.tar", 0, 3)
    source = TarShards(shard, DECODER)
    os.unlink(shard) if change == "removed" else os.truncate(shard, 1100)
    with pytest.raises(UnreadableError) as caught:
        source.load(2)
    assert caught.value.transient
    assert source.sides(np.array([2])).tolist() == [0]


def test_a_shard_that_comes_back_in_a_moment_is_read(tmp_path):
    shard = write_images(tmp_path / "a.tar", 0, 3)
    source = TarShards(shard, DECODER)
    os.rename(shard, tmp_path / "away")
    back = threading.Timer(0.1, os.rename, (tmp_path / "away", shard))
    back.start()
    assert np.array_equal(source.load(2), pixels_of(2))
    back.join()
