"""Benchmarks on a tiny random model: what they write_report is checked, not how fast it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from slipstream.cli import main

TINY = ["--shape", "tiny", "--random-weights", "--device", "cpu"]
Bench = Callable[..., dict[str, Any]]


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Bench:
    """Runs a kind of benchmark on the tiny shape; its JSON line, with what people were shown under "shown"."""

    def run(what: str, *arguments: str) -> dict[str, Any]:
        assert main(["bench", what, *TINY, *arguments]) == 0
        lines = capsys.readouterr().out.splitlines()
        return {**json.loads(lines[-1]), "shown": "\n".join(lines[:-1])}

    return run
