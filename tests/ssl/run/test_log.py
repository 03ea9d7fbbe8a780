import json
import math

import pytest

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
