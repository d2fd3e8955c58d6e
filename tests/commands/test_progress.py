"""Progress: lines where there is no terminal, a bar that leaves nothing behind where there is one."""

from __future__ import annotations

import io
import sys
import time

import pytest
from fake_clock import Clock

from slipstream.commands import progress
from slipstream.commands.progress import LoadingBar, Turns, shown

MB = 10**6


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_a_slow_model_is_loaded_with_a_line_each_tenth_or_five_seconds(
    capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    bar = LoadingBar(lines=True)
    for seconds, num_bytes in ((2, 5), (2, 5), (2, 1), (2, 1), (2, 1), (2, 87)):
        clock.now += seconds
        bar(num_bytes * MB, 100 * MB)
    assert capsys.readouterr().err.splitlines() == [
        "loading: 10 % of 100.0 MB",
        "loading: 13 % of 100.0 MB",
        "loading: 100.0 MB read, getting ready",
    ]


def test_a_fast_model_is_one_line_and_silent_unless_asked(capsys: pytest.CaptureFixture[str]) -> None:
    for lines in (True, False):
        bar = LoadingBar(lines=lines)
        for _ in range(100):
            bar(MB, 100 * MB)
    assert capsys.readouterr().err == "loading: 100.0 MB read, getting ready\n"


def test_on_a_terminal_a_full_bar_says_what_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    bar = LoadingBar()
    bar(MB, MB)
    assert "read, getting ready: 100%" in terminal.getvalue()
    bar.close()


def test_a_closed_bar_stays_closed(capsys: pytest.CaptureFixture[str]) -> None:
    """The loading thread goes on for a moment after Ctrl-C."""
    bar = LoadingBar(lines=True)
    bar.close()
    bar(MB, MB)
    assert capsys.readouterr().err == ""


def test_turns_are_lines_that_do_not_flood(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    for turn in shown(range(4), "speed"):
        clock.now += 2 if turn == 1 else 0
    with Turns("quick", 2) as quick:
        quick.advance()
        quick.advance()
    assert capsys.readouterr().err.splitlines() == [
        "speed: 0 of 4",
        "speed: 2 of 4",
        "speed: 4 of 4",
        "quick: 0 of 2",
        "quick: 2 of 2",
    ]


def test_the_clock_is_the_real_one() -> None:
    assert progress.time is time
