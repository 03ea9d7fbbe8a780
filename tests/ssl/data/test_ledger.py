"""Unreadable images: named once, counted, kept, and refused where they are too many."""

import json
import logging
import os

import pytest

from nestling.ssl.data.failures import Failure
from nestling.ssl.data.ledger import FILE, Ledger, unreadable
from nestling.ssl.errors import UserError

A, B = Failure(0, "/i/a.png", "is empty"), Failure(1, "/i/b.png", "is truncated")


def test_each_path_is_warned_of_once(caplog):
    ledger = Ledger(0.5, 10)
    with caplog.at_level(logging.WARNING, "nestling"):
        ledger.exchange([A, A])
        ledger.exchange([A, B])
        ledger.exchange([B])
    assert caplog.messages == ["left out /i/a.png: is empty", "left out /i/b.png: is truncated"]
    assert ledger.paths() == ["/i/a.png", "/i/b.png"]


def test_replaced_samples_are_summed():
    assert Ledger(0.5, 10).exchange([A], replaced=3) == 3


def test_a_share_above_the_limit_is_refused():
    ledger = Ledger(0.1, 10)
    ledger.exchange([A, A, A])  # one path of ten
    with pytest.raises(UserError, match=r"^2 of 10 images can't be read, .*data\.max_bad_share=0\.1 "):
        ledger.exchange([B])


def test_the_kept_list_brings_every_name_back_byte_by_byte_and_once(tmp_path):
    raw = os.fsdecode(b'/i/\xff\xfe\n"\xe7\x8c\xab.png')
    first = Ledger(0.5, 10)
    first.exchange([A])
    first.keep_in(tmp_path)
    first.exchange([Failure(2, raw, "is torn"), A])
    again = Ledger(0.5, 10)  # of the same run, resumed
    again.keep_in(tmp_path)
    again.exchange([A])
    assert unreadable(tmp_path / FILE) == {A.path: A.reason, raw: "is torn"}
    assert os.fsencode(list(unreadable(tmp_path / FILE))[1]) == os.fsencode(raw)
    lines = (tmp_path / FILE).read_bytes().splitlines()
    assert len(lines) == 2
    assert all(json.loads(line.decode("ascii")) for line in lines)


def test_without_unreadable_images_no_file_is_left(tmp_path):
    ledger = Ledger(0.5, 10)
    ledger.keep_in(tmp_path)
    ledger.exchange([])
    assert list(tmp_path.iterdir()) == []
    assert unreadable(tmp_path / FILE) == {}
