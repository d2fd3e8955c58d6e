"""`slipstream bench peer`: both sides are measured by one rule, in turns, and a busy machine is report."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from slipstream.bench.harness.cpu_share import OtherProcesses, warning
from slipstream.bench.harness.traffic import TokenTimes
from slipstream.bench.kinds.peer import PeerPace, compare, pace, prompt_rate
from slipstream.cli import main

Bench = Callable[..., dict[str, Any]]
SHORT = ["--streams", "1,3", "--prompt", "40", "--new", "6", "--repeats", "2"]


@pytest.mark.parametrize("dtype", ["int8", "auto"])
def test_a_shape_and_its_twin(bench: Bench, dtype: str) -> None:
    pytest.importorskip("xllamacpp")
    report = bench("peer", *SHORT, "--dtype", dtype, "--modes", "off,2", "--vocab", "300")
    assert report["model"] == "tiny with 300 tokens"
    rows = report["results"]
    assert [(row["streams"], row["mode"]) for row in rows] == [(n, mode) for n in (1, 3) for mode in ("off", "2")]
    for row in rows:
        assert len(row["decode_ratios"]) == len(row["prompt_ratios"]) == 2
        assert all(row[key] > 0 for key in ("decode_tok_s", "peer_decode_tok_s", "prompt_tok_s", "peer_prompt_tok_s"))
    assert "llama.cpp: xllamacpp" in report["shown"]


def test_one_after_the_other(bench: Bench) -> None:
    """The same rows; ours are measured and its memory is free before llama.cpp starts."""
    pytest.importorskip("xllamacpp")
    report = bench("peer", *SHORT, "--apart", "--vocab", "300", "--stored-as", "Q8_0")
    assert [row["streams"] for row in report["results"]] == [1, 3]
    for row in report["results"]:
        assert len(row["decode_ratios"]) == 2
        assert row["decode_ratio"] > 0
    assert report["settings"]["apart"]
    assert "one after the other" in report["shown"]


def test_the_default_model_and_its_own_file(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("xllamacpp")
    assert main(["bench", "peer", "--device", "cpu", "--streams", "2", "--new", "4", "--repeats", "1"]) == 0
    assert '"bench": "peer"' in capsys.readouterr().out


def test_a_model_without_a_gguf_is_refused_before_it_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = ["--shape", "tiny", "--random-weights", "--device", "cpu"]
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    assert main(["bench", "peer", *tiny]) == 1
    assert "pip install xllamacpp" in capsys.readouterr().err
    assert main(["bench", "peer", *tiny, "--new", "1"]) == 1
    assert "new at least 2" in capsys.readouterr().err


def test_prompts_are_read_until_the_last_stream_has_begun() -> None:
    streams = [TokenTimes(1.0, [3.0], [1]), TokenTimes(1.5, [5.0], [1])]
    assert prompt_rate(streams, [[0] * 30, [0] * 10]) == 10.0


def test_decoding_and_reading_are_asked_for_apart() -> None:
    asked: list[int] = []

    def answering(given: Any, num_new: int) -> list[TokenTimes]:
        asked.append(num_new)
        return [TokenTimes(0.0, [2.0 + 0.5 * i for i in range(num_new)], [1] * num_new) for _ in given]

    assert pace(answering, [[0] * 8] * 2, 5) == PeerPace(decode=4.0, prompt=8.0)
    assert asked == [5, 1]


def test_ratios_are_of_one_turn() -> None:
    turns = [
        {"off": PeerPace(a, 10 * a), "llama.cpp": PeerPace(b, 5 * b)} for a, b in ((4.0, 2.0), (1.0, 1.0), (30.0, 10.0))
    ]
    row = compare(1, "off", turns, None)
    assert (row.decode_ratio, row.prompt_ratio) == (2.0, 4.0)
    assert row.decode_ratios == (2.0, 1.0, 3.0)
    assert (row.decode_tok_s, row.peer_decode_tok_s) == (4.0, 2.0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads CPU time from /proc")
def test_what_others_take_is_seen_and_what_is_ours_is_not() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        everyone, without = OtherProcesses([]), OtherProcesses([busy.pid])
        time.sleep(1.0)
        seen, unseen = everyone.share(), without.share()
        busy.kill()
    assert seen is not None
    assert unseen is not None
    assert seen > unseen


def test_a_warning_only_where_it_is_known_and_much() -> None:
    assert warning([None, 0.02]) == ""
    assert "up to 45 %" in warning([0.1, 0.45])
