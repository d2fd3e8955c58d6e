"""Downloads in logs, by the bars of the hub's client: a line at the first bytes, every few seconds, at the end."""

from __future__ import annotations

import pytest
from fake_clock import Clock
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

from slipstream.load.hf import fetch_bars
from slipstream.load.hf.fetch_bars import Cancelled, FetchBars

MB = 10**6


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(fetch_bars, "time", clock)
    return clock


def test_lines_that_do_not_flood(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    """Two bars count the same bytes, one more counts files."""
    lines = FetchBars("some-org/x", as_lines=True)
    bars = [lines.bar_class()(total=100 * MB, unit="B", unit_scale=True) for _ in range(2)]
    files = lines.bar_class()(total=3)
    for seconds in (0, 2, 2, 2, 0):
        clock.now += seconds
        for bar in bars:
            bar.update(20 * MB)
        files.update(1)
    for bar in (*bars, files):
        bar.close()
    lines.close()
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "fetching some-org/x: 20.0 of 100.0 MB",
        "fetching some-org/x: 80.0 of 100.0 MB",
        "fetched some-org/x: 100.0 MB",
    ]


def test_nothing_is_said_where_nothing_is_fetched_or_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    lines = FetchBars("some-org/x", as_lines=True)
    lines.bar_class()(total=0, unit="B").close()
    disable_progress_bars()
    try:
        lines.bar_class()(total=1, unit="B").update(1)
    finally:
        enable_progress_bars()
    lines.close()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("as_lines", [True, False])
def test_what_is_cancelled_goes_no_further(as_lines: bool) -> None:
    bars = FetchBars("some-org/x", as_lines)
    bar = bars.bar_class()(total=100 * MB, unit="B")
    bar.update(MB)
    bars.cancel()
    with pytest.raises(Cancelled):
        bar.update(MB)
    bar.close()
