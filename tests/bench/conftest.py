"""Benchmarks on a tiny random model: what they write_report is checked, not how fast it was."""

from __future__ import annotations

import json
import re
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
        printed = capsys.readouterr()
        assert re.search(r"loading: .* read|: 0 of \d+", printed.err), "no word about its progress"
        lines = printed.out.splitlines()
        return {**json.loads(lines[-1]), "shown": "\n".join(lines[:-1])}

    return run
