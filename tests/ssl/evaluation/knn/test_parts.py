"""The rows of a process: one for each readable image, faults by path, on a disk as in memory."""

from pathlib import Path

import pytest
import torch

from nestling.backbones.features import Backbone, Features
from nestling.ssl.data.failures import Failure
from nestling.ssl.data.loader import EvalBatch
from nestling.ssl.errors import UserError
from nestling.ssl.evaluation.knn.exact import loaded, unit_rows
from nestling.ssl.evaluation.knn.judge import Search
from nestling.ssl.evaluation.knn.memory import told_before
from nestling.ssl.evaluation.knn.parts import scratch, vectors_of


class Colours(Backbone):
    """An image's mean colours are its vector; a white one is not finite, a black one zero."""

    name, embed_dim, stride, min_size = "colours", 3, 1, 1

    def forward(self, images, mask=None):
        cls = images.mean(dim=(2, 3))
        return Features(torch.where(cls == 1, torch.nan, cls), images.flatten(2).mT, (2, 2))

    def pyramid(self, images):
        raise NotImplementedError

    def attention(self, images):
        raise NotImplementedError


def images(*levels):
    pixels = torch.tensor(levels, dtype=torch.uint8).view(-1, 1, 1, 1).repeat(1, 3, 2, 2)
    pixels[:, 0] //= 2
    return pixels


def vectors(pixels, failures=(), **settings):
    read = torch.tensor([i for i in range(len(pixels)) if i not in {failure.image for failure in failures}])
    batches = [EvalBatch(part, pixels[part], []) for part in read.split(2)]
    batches.append(EvalBatch(read[:0], pixels[:0], list(failures)))
    shared = (["cls"], [0.0] * 3, [1.0] * 3, torch.device("cpu"), "{}.png".format, "data.train=x")
    return vectors_of(Colours(), batches, len(pixels), *shared, **settings)


def test_rows_are_those_of_the_readable_images_in_memory_and_on_a_disk(tmp_path):
    pixels, failure = images(10, 0, 30, 40, 50), Failure(3, "3.png", "is empty")
    files = torch.tensor([7, 8, 9, 10, 7])
    kept = vectors(pixels, [failure], files=files)
    with scratch(str(tmp_path / "new")) as folder:
        stored = vectors(pixels, [failure], files=files, folder=folder)
        (part, disk) = kept.parts["cls"], stored.parts["cls"]
        assert (part.rows.dtype, disk.rows.dtype) == (torch.float32, torch.float16)
        assert (loaded(disk.rows) - part.rows).abs().max() < 3e-4
        expected = unit_rows(pixels[[0, 1, 2, 4]].double().mean((2, 3)))
        torch.testing.assert_close(part.rows, expected, atol=1e-6, rtol=0)
        for found in (part, disk):
            assert found.indices.tolist() == [0, 1, 2, 4]
            assert found.files.tolist() == [7, 8, 9, 7]
            assert found.chosen(torch.tensor([4, 2])).indices.tolist() == [2, 4]
        assert [file.stat().st_size for file in folder.iterdir()] == [4 * 3 * 2]
    assert not [*(tmp_path / "new").iterdir()]
    for side in (kept, stored):
        assert side.readable.tolist() == [0, 1, 2, 4]
        assert side.failures == [failure]
        assert side.zero == {"cls": ["1.png"]}
        assert side.spreads["cls"] == pytest.approx(float(part.rows.std(dim=0, correction=0).max()), abs=1e-5)


def test_images_whose_vector_is_not_finite_are_named_by_path():
    pixels = images(10, 20)
    pixels[1] = 255
    with pytest.raises(UserError, match=r"cls of 1 images \(1\.png\) of data\.train=x is not finite"):
        vectors(pixels)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is always full")
def test_a_disk_that_fills_up_ends_it_in_one_sentence(tmp_path):
    (tmp_path / "cls.f16").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"knn\.features_dir=.* can't be written: No space left"):
        vectors(images(10, 20), folder=tmp_path)


def test_the_users_own_folder_may_be_said_with_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    told_before(384, Search("flat", "~/new"), (1000, 50), 1)
    with scratch("~/new") as folder:
        assert folder.parent == tmp_path / "new"
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_what_it_will_take_is_said_and_a_disk_too_small_refused(tmp_path, caplog):
    with caplog.at_level("INFO", "nestling"):
        told_before(384, Search(), (10**13, 50_000), 2)
        told_before(384, Search("hnsw", str(tmp_path)), (1000, 50), 1)
    first, warning, second = (record.getMessage() for record in caplog.records)
    assert "10000000000000 + 50000 images, 384 numbers each: 1.54e+04 TB of training features in mem" in first
    assert first.endswith("over 2 processes")
    assert "7.68e+03 TB of memory will be needed here" in warning  # one of the two processes is here
    assert f"768 kB of training features as float16 in {tmp_path}, " in second
    with pytest.raises(UserError, match=r"features_dir=.*: the training features take 7\.68e\+04 TB there"):
        told_before(384, Search("flat", str(tmp_path)), (10**14, 50), 1)
