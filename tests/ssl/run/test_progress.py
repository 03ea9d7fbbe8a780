import io
import logging

import pytest
from rich.console import Console

from nestling.ssl.run import progress

RECORD = {"loss": 4.5678, "images_per_second": 227.4, "epoch": 0.5, "lr": 1e-3}


def shown(monkeypatch, mode: str, terminal: bool, rank: float | None = None) -> str:
    """What a person sees of a run of 40 steps, 20 of them done before."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120, highlight=False, color_system=None)
    monkeypatch.setattr(progress, "console", console)
    with progress.RunProgress(mode, first_step=20, num_steps=40) as run:
        run.knn(0.8123) if rank is None else run.rankme(rank)
        for step in range(21, 31):
            run.step(step)
            run.record(step, RECORD)
    return out.getvalue()


def test_a_terminal_gets_a_bar_with_step_loss_knn_speed_and_time_left(monkeypatch):
    said = shown(monkeypatch, "auto", terminal=True)
    last = said[said.rindex("step ") :]
    for fact in ("step 30/40", "loss 4.5678", "k-NN 81.2%", "227 images/s", "0:00:0"):
        assert fact in last, last


def test_without_labels_the_rank_of_the_features_is_shown_instead(monkeypatch):
    said = shown(monkeypatch, "plain", terminal=False, rank=12.345)
    assert "RankMe 12.3" in said
    assert "k-NN" not in said


def test_a_file_gets_plain_lines_without_control_characters(monkeypatch):
    said = shown(monkeypatch, "auto", terminal=False)
    lines = said.splitlines()
    assert len(lines) == 10
    assert "\x1b" not in said
    for fact in ("step 30/40", "epoch 0.50", "loss 4.5678", "k-NN 81.2%", "227 images/s", "left 0:00:0"):
        assert fact in lines[-1], lines[-1]


@pytest.mark.parametrize("terminal", [True, False])
def test_none_shows_nothing(monkeypatch, terminal):
    assert shown(monkeypatch, "none", terminal) == ""


def test_only_the_main_process_speaks(monkeypatch):
    logger = logging.getLogger("nestling")
    before = logger.handlers, logger.level, logger.propagate
    out = io.StringIO()
    monkeypatch.setattr(progress, "console", Console(file=out, width=200))
    try:
        for is_main in (True, False):
            progress.say_only_here(is_main)
            logger.info(f"from main {is_main}")
            logger.warning("careful [bold]")
    finally:
        logger.handlers, level, logger.propagate = before
        logger.setLevel(level)  # not the attribute: it caches what the level let through
    assert out.getvalue() == "from main True\nwarning: careful [bold]\n"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00:00"), (59.6, "0:01:00"), (7384, "2:03:04")])
def test_durations_read_as_hours_minutes_seconds(seconds, text):
    assert progress.duration(seconds) == text
