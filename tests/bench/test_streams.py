"""`slipstream bench streams`: every setting is measured and report, simulation is never silent, ratios are right."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tiny_chat_model import write_tiny_chat_model

from slipstream.bench.harness.mixed_traffic import per_stream
from slipstream.bench.harness.traffic import StreamLog, decode_rate
from slipstream.bench.kinds.streams import StreamsResult, against, same_as_off
from slipstream.cli import main

Bench = Callable[..., dict[str, Any]]
SHORT = ["--new", "12", "--warm", "2", "--prompt", "8"]
LABEL = "ACCEPTANCE SIMULATED at 1/1/0"


def test_every_mode_at_every_load(bench: Bench) -> None:
    report = bench("streams", *SHORT, "--streams", "1,3", "--modes", "off,solo,2,adaptive", "--temperature", "0,1")
    rows = report["results"]
    loads = [(row["temperature"], row["streams"], row["mode"]) for row in rows]
    modes = ("off", "solo", "2", "adaptive")
    assert loads == [(t, n, mode) for t in (0.0, 1.0) for n in (1, 3) for mode in modes]
    for row in rows:
        assert row["output_tokens"] == 12 * row["streams"]
        assert row["prompt_tokens"] == 8 * row["streams"]
        assert row["wall_s"] == pytest.approx(row["output_tokens"] / row["tok_s"], rel=0.01, abs=1e-4)  # it is rounded
        assert row["streams_same_as_off"] == row["streams"], "drafting changed the tokens"
        assert row["preemptions"] == 0
    for row in rows:
        drafted = bool(row["accepted_per_position"])
        assert drafted == (row["mode"] == "2" or (row["mode"] in ("solo", "adaptive") and drafted))
        if row["mode"] == "off" or (row["mode"] == "solo" and row["streams"] == 3):
            assert not drafted
            assert row["tokens_per_step"] == 1.0
    assert report["simulated_acceptance"] is None
    assert "SIMULATED" not in report["shown"]
    assert report["memory"].keys() == {"planned", "resident"}


def test_a_simulated_run_is_labelled_everywhere(bench: Bench, tmp_path: Path) -> None:
    drawn = tmp_path / "streams.svg"
    report = bench(
        "streams", *SHORT, "--streams", "2", "--modes", "off,3", "--simulate-acceptance", "1,1,0", "--mix",
        "--plot", str(drawn), "--save", str(tmp_path / "kept"), "--out", str(tmp_path / "lines"),
    )  # fmt: skip
    off, three = report["results"]
    assert three["accepted_per_position"] == [1.0, 1.0, 0.0]
    assert off["tokens_per_step"] == 1.0
    assert three["tokens_per_step"] == 2.0  # 1 + 3 + 3 + 3 + 1 + 1: nothing is drafted past the length limit
    assert three["streams_same_as_off"] is None
    assert report["simulated_acceptance"] == [1.0, 1.0, 0.0]
    assert report["shown"].count(LABEL) == 3, "the head, the table and the mix"
    assert LABEL in drawn.read_text()
    [kept] = (tmp_path / "kept").iterdir()
    assert json.loads(kept.read_text())["simulated_acceptance"] == [1.0, 1.0, 0.0]
    assert json.loads((tmp_path / "lines").read_text())["results"] == report["results"]
    assert str(tmp_path) not in kept.read_text()
    assert "--plot streams.svg" in report["command"]


def test_a_model_that_cannot_draft_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Or its rows of other modes would look like drafts that were never accepted."""
    folder = str(write_tiny_chat_model(tmp_path))
    arguments = ["--device", "cpu", "--kv-memory", "4M", "--streams", "1", "--modes", "off,2", *SHORT]
    assert main(["bench", "streams", folder, *arguments]) == 0
    missing = "the checkpoint has no mtp.* tensors; give one with --mtp"
    assert f"\nnothing is drafted: no MTP head: {missing}\n" in capsys.readouterr().out


def test_the_mix_compares_plain_streams(bench: Bench) -> None:
    report = bench("streams", *SHORT, "--streams", "1,4", "--modes", "off,2", "--mix")
    [row] = report["mix"]
    assert (row["streams"], row["mode"]) == (4, "2")
    assert row["kept"] == pytest.approx(row["plain_mixed_tok_s"] / row["plain_alone_tok_s"], rel=0.01)
    assert row["drafting_tok_s"] > 0


def test_the_plot_is_a_drawing_of_the_results(bench: Bench, tmp_path: Path) -> None:
    drawn = tmp_path / "streams.svg"
    bench("streams", *SHORT, "--streams", "1,2", "--modes", "off,1", "--plot", str(drawn))
    root = ElementTree.fromstring(drawn.read_text())
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{space}polyline")) == 2
    assert len(root.findall(f"{space}circle")) == 4
    texts = {text.text for text in root.findall(f"{space}text")}
    assert {"off", "depth 1", "1", "2", "streams at once"} <= texts


def a_row(mode: str, tok_s: float, **more: Any) -> StreamsResult:
    return replace(StreamsResult(0.0, 4, mode, 8, 8, 1.0, tok_s, None, 0.1, 1.0, (), 0, ((1, 2), (3, 4))), **more)


def test_ratios_are_to_the_same_load() -> None:
    rows = [a_row("off", 10), a_row("2", 16), a_row("solo", 10), a_row("adaptive", 20), a_row("off", 99, streams=8)]
    assert against(rows[3], rows) == {"against_off": 2.0, "against_best_fixed": 1.25, "against_solo": 2.0}
    assert against(rows[4], rows) == {"against_off": 1.0, "against_best_fixed": 1.0, "against_solo": None}


def test_streams_that_differ_are_counted() -> None:
    rows = [a_row("off", 10), a_row("2", 10, tokens=((1, 2), (3, 5)))]
    assert [same_as_off(row, rows) for row in rows] == [2, 1]
    assert same_as_off(rows[1], rows[1:]) is None


def a_log(times: list[float], counts: list[int]) -> StreamLog:
    log = StreamLog(8)
    log.times, log.counts = times, counts
    return log


def test_decoding_is_measured_from_the_last_first_token_on() -> None:
    logs = [a_log([1.0, 2.0, 3.0], [1, 2, 3]), a_log([2.0, 4.0], [1, 4])]
    assert decode_rate(logs) == (3 + 4) / 2.0
    assert decode_rate([a_log([1.0], [1])]) is None


def test_the_mix_looks_at_the_time_when_all_decode() -> None:
    plain, drafting = a_log([1.0, 2.0, 3.0, 4.0], [1, 1, 1, 1]), a_log([1.5, 2.0, 3.0], [1, 4, 4])
    assert per_stream([plain, drafting], [plain]) == pytest.approx(2 / 1.5, abs=0.01)
    assert per_stream([plain, drafting], [drafting]) == pytest.approx(8 / 1.5, abs=0.01)
    assert per_stream([a_log([1.0, 2.0], [1, 1]), a_log([3.0, 4.0], [1, 1])], []) is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shape", "tiny"], "--random-weights"),
        (["--random-weights"], "--shape"),
        (["--shape", "tiny", "--random-weights", "--mtp", "head"], "--mtp"),
        (["--shape", "tiny", "--random-weights", "--simulate-acceptance", "0.5,0.6"], "simulate_acceptance"),
        (["--shape", "tiny", "--random-weights", "--plot", "/no/such/folder/x.svg"], "/no/such/folder/x.svg"),
        (["--shape", "tiny", "--random-weights", "--new", "0"], "new"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["bench", "streams", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error
