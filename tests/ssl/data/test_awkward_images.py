"""The folder of awkward images is what it says it is, to the decoder and to the scan."""

import os

import numpy as np
import pytest
from awkward_images import READABLE, write_awkward_folder
from image_folder import texture

from nestling.ssl.data.decoding.decoder import Decoder
from nestling.ssl.data.failures import UnreadableError
from nestling.ssl.data.sources.folder import Folder


@pytest.fixture(scope="module")
def awkward(tmp_path_factory):
    return write_awkward_folder(tmp_path_factory.mktemp("data") / "awkward")


def test_what_is_called_readable_is_read_in_every_converting_mode(awkward):
    for decoder in (Decoder(), Decoder("gray", 1)):
        for path in awkward.readable:
            assert decoder.file(os.fspath(path)).shape[2] == decoder.channels


def test_what_is_called_unreadable_is_refused_for_the_reason_given(awkward):
    for path, reason in awkward.unreadable.items():
        with pytest.raises(UnreadableError) as refused:
            Decoder().file(os.fspath(path))
        assert reason in refused.value.reason
        assert refused.value.transient == (path.name == "failing.jpg")


def test_a_scan_finds_these_images_and_no_others(awkward, tmp_path):
    source = Folder(str(awkward.root), cache=str(tmp_path))
    found = sorted(os.fsencode(source.path(index)) for index in range(len(source)))
    assert found == sorted(os.fsencode(path) for path in [*awkward.readable, *awkward.unreadable])
    assert source.class_names == awkward.classes


def test_every_class_has_enough_to_learn_from(awkward):
    for name in awkward.classes:
        assert sum(path.parent.name == name for path in awkward.readable) >= 8


@pytest.mark.parametrize(
    "name", ["photo.jpg", "cmyk.jpg", "ycck.jpg", "sixteen_bit_colors.tif", "picture.webp"]
)
def test_colours_survive_however_they_are_stored(tmp_path, name):
    pixels = texture(0, 32, np.random.default_rng(0))
    READABLE[name](tmp_path / name, pixels)
    assert np.abs(Decoder().file(str(tmp_path / name)).astype(int) - pixels).mean() < 15  # inverted: over 100
