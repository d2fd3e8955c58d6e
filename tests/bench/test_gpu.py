"""bench/gpu.py: its commands are ones that exist, and what it runs is reported."""

from __future__ import annotations

import importlib
import shlex
from pathlib import Path
from types import ModuleType

import pytest

from slipstream.cli import build_parser

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("gpu")


def test_every_command_exists(gpu: ModuleType) -> None:
    entries = [entry for part in gpu.PARTS.values() for entry in part]
    assert len({entry.name for entry in entries}) == len(entries)
    parser = build_parser()
    for entry in entries:
        words = shlex.split(entry.command)
        if entry.is_bench:
            assert parser.parse_args(words[2:]).command == "bench"
        else:
            files = [word for word in words if word.startswith("tests/")]
            assert files
            assert all((ROOT / file).exists() for file in files)


def test_tests_run_file_by_file(gpu: ModuleType, tmp_path: Path) -> None:
    [entry] = gpu.PARTS["right"]
    files = [command[-1] for command in entry.commands(tmp_path)]
    assert len(set(files)) == len(files)
    assert {"tests/runners/cuda/test_gdn.py", "tests/conformance/test_resident.py"} < set(files)
    assert all((ROOT / file).is_file() for file in files)
    assert all("not exhaustive" in command for command in entry.commands(tmp_path))


def test_a_part_fits_a_call_or_says_what_it_leaves_out(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = [
        gpu.Entry("first", 60, "-c 'print(1 + 1)'"),
        gpu.Entry("second", 60, "-c 'raise SystemExit(3)'"),
        gpu.Entry("third", 1, "-c 'import time; time.sleep(600)'"),
        gpu.Entry("fourth", 10_000, "-c pass"),
    ]
    monkeypatch.setattr(gpu, "PARTS", {"some": entries})
    assert gpu.main(["some", "--out", str(tmp_path), "--seconds", "500"]) == 0
    first, second, third, fourth = capsys.readouterr().out.splitlines()
    assert first.startswith("first: done in ")
    assert second.startswith("second: failed (3) in ")
    assert third == "third: ended after 2 s"
    assert fourth == "fourth: left out: too little time"
    assert (tmp_path / "first.txt").read_text() == "python -c 'print(1 + 1)'\n2\n"
    assert gpu.main(["some", "--out", str(tmp_path), "--from", "fourth", "--seconds", "20000"]) == 0
    assert capsys.readouterr().out.startswith("fourth: done")
