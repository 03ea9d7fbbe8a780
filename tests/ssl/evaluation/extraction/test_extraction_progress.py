"""Plain lines say images, images/s and time left."""

import re

from nestling.ssl.evaluation.extraction import progress
from nestling.ssl.evaluation.extraction.progress import ExtractionProgress


def test_plain_lines_count_for_all_processes_from_where_it_goes_on(capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
    with ExtractionProgress("plain", total=100, done=40, processes=3) as shown:
        shown.add(10)
        shown.add(10)
    said = re.findall(r"image (\d+)/100  \d+ images/s  left (\d+:\d\d:\d\d)", capsys.readouterr().out)
    assert [image for image, _ in said] == ["70", "100", "100"]
    assert said[-1][1] == "0:00:00"


def test_none_says_nothing_and_a_run_that_failed_no_last_line(capsys):
    with ExtractionProgress("none", 10, 0, 1) as shown:
        shown.add(10)
    try:
        with ExtractionProgress("plain", 10, 0, 1) as shown:
            shown.add(5)
            raise OSError
    except OSError:
        assert capsys.readouterr().out == ""
