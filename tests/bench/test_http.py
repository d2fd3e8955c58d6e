"""`slipstream bench http` on the default model: it measures both ways and reports every turn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.cli import main


def test_both_ways_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--draft", "2", "--max-streams", "2", "--max-context", "512"]
    kept = ["--out", str(tmp_path / "lines")]
    assert main(["bench", "http", *model, "--streams", "1,2", "--tokens", "4", "--repeats", "1", *kept]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((tmp_path / "lines").read_text()) == report
    assert {"model", "settings", "host", "command", "versions"} <= report.keys()
    assert [each["streams"] for each in report["results"]] == [1, 2]
    for each in report["results"]:
        assert each["ratio"] == pytest.approx(each["http_tok_s"] / each["direct_tok_s"], rel=0.05)
