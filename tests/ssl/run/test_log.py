import json
import math
import os

import pytest
from full_disks import files_of_at_most

from nestling.ssl.run.log import JsonLog, read


def test_every_line_is_strict_json_even_for_numbers_that_json_lacks(tmp_path):
    log = JsonLog(tmp_path / "log.jsonl")
    log.write({"step": 1, "loss": math.nan, "kl": -math.inf, "lr": 1e-3})
    log.close()
    text = (tmp_path / "log.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"step": 1, "loss": None, "kl": None, "lr": 1e-3}


def test_a_record_is_on_disk_as_soon_as_it_is_written(tmp_path):
    log = JsonLog(tmp_path / "log.jsonl")
    log.write({"step": 1})
    assert read(tmp_path / "log.jsonl") == [{"step": 1}]
    log.close()


def test_resuming_drops_lines_of_lost_steps_and_a_torn_last_line(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "lo')
    log = JsonLog(path, last_step=2)
    log.write({"step": 3, "again": True})
    log.close()
    assert read(path) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]


def test_a_run_without_a_checkpoint_starts_its_log_anew(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n')
    JsonLog(path).close()
    assert read(path) == []


def test_on_a_full_disk_lines_wait_and_none_is_lost_or_torn(tmp_path, caplog):
    path = tmp_path / "log.jsonl"
    log = JsonLog(path)
    log.write({"step": 0})
    with files_of_at_most(20):
        for step in (1, 2, 3):
            log.write({"step": step})
    assert path.stat().st_size == 20, "a line was cut by the limit"
    log.write({"step": 4})
    log.close()
    assert [record["step"] for record in read(path)] == [0, 1, 2, 3, 4]
    assert len(path.read_text().splitlines()) == 5
    assert caplog.text.count("waits for room: File too large") == 1


def test_a_completed_line_takes_the_place_of_the_last_in_one_go(tmp_path, monkeypatch):
    path = tmp_path / "log.jsonl"
    log = JsonLog(path)
    for step in (0, 1):
        log.write({"step": step, "due": True})
    seen, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: (seen.append(read(path)), replace(*paths)))
    log.complete({"step": 1, "knn": 0.5})
    log.write({"step": 2})
    log.close()
    assert seen == [[{"step": 0, "due": True}, {"step": 1, "due": True}]], "until then the old one was there"
    assert read(path) == [{"step": 0, "due": True}, {"step": 1, "knn": 0.5}, {"step": 2}]


@pytest.mark.parametrize("room", [30, 50], ids=["the line itself waits", "the line was there"])
def test_on_a_full_disk_a_completed_line_waits_and_the_old_one_stays(room, tmp_path, caplog):
    path = tmp_path / "log.jsonl"
    log = JsonLog(path)
    log.write({"step": 0})
    with files_of_at_most(room):
        log.write({"step": 1, "due": True})
        log.complete({"step": 1, "knn": 0.5, "accuracies": "many"})
        log.write({"step": 2})
        assert path.read_text() == '{"step": 0}\n{"step": 1, "due": true}\n'[:room]
        log.close()
        assert "lacks its last lines (2)" in caplog.text
    log = JsonLog(tmp_path / "other.jsonl")
    log.write({"step": 0})
    with files_of_at_most(room):
        log.write({"step": 1, "due": True})
        log.complete({"step": 1, "knn": 0.5, "accuracies": "many"})
        log.write({"step": 2})
    log.write({"step": 3})
    log.close()
    assert [record["step"] for record in read(tmp_path / "other.jsonl")] == [0, 1, 2, 3]
    assert read(tmp_path / "other.jsonl")[1] == {"step": 1, "knn": 0.5, "accuracies": "many"}
    assert caplog.text.count("waits for room: File too large") == 2


def test_lines_that_found_no_room_at_the_end_are_counted(tmp_path, caplog):
    log = JsonLog(tmp_path / "log.jsonl")
    with files_of_at_most(20):
        for step in (0, 1, 2):
            log.write({"step": step})
        log.close()
    assert "log.jsonl lacks its last lines (2)" in caplog.text
    assert [record["step"] for record in read(tmp_path / "log.jsonl")] == [0]
