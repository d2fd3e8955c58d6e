"""The scripts of `make clients` that need nothing but a small package, against the real server."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from real_server import RealServer

SCRIPTS = Path(__file__).parents[2] / "clients" / "scripts"


@pytest.mark.parametrize("package", ["openai", "anthropic", "ollama"])
def test_its_script_runs(
    real: RealServer, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(package)
    monkeypatch.setattr(sys, "argv", ["script", real.url])
    runpy.run_path(str(SCRIPTS / f"{package}_sdk.py"), run_name="__main__")
    assert capsys.readouterr().out.endswith(" requests\n")


def test_mtp_bench_reads_the_timings(
    real: RealServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mtp_bench", real.url, "4"])
    runpy.run_path(str(SCRIPTS / "mtp_bench.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert '"requests": 9' in lines[-1]
