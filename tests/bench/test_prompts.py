"""`slipstream bench`: a table, one JSON line, and no silence about tokens that differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream import LLM
from slipstream.bench.harness.prompt_rounds import PromptRound, PromptRow, against_off, differences, fastest
from slipstream.cli import main

PARIS = "What is the capital of France?"


def test_prompts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    arguments = ["--tokens", "3", "--policies", "off,2", "--max-context", "1024", "--out", str(out)]
    assert main(["bench", "prompts", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(lines[-1])
    assert json.loads(out.read_text()) == report
    assert report["same_tokens"] is True
    assert [each["policy"] for each in report["results"]] == ["off", "2"]
    assert report["results"][0]["against_off"] == 1.0
    assert all(each["total_predicted"] == 27 for each in report["results"])
    assert any(line.startswith("speculation: ") for line in lines)


def test_prompts_says_when_a_policy_changes_tokens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.bench.kinds.prompts.MTP_BENCH_PROMPTS", {"paris": PARIS})
    plain = LLM.generate

    def other(self: LLM, prompts: list[list[int]], params: object) -> list[object]:
        """Another question wherever drafts are made."""
        asked = [prompt[:-1] if getattr(params, "draft", "") == 2 else prompt for prompt in prompts]
        return list(plain(self, asked, params))  # type: ignore[arg-type]

    monkeypatch.setattr(LLM, "generate", other)
    assert main(["bench", "prompts", "--tokens", "3", "--policies", "off,2", "--max-context", "512"]) == 1
    out, err = capsys.readouterr()
    assert "WRONG" in err
    assert "paris" in err
    assert json.loads(out.splitlines()[-1])["same_tokens"] is False


def test_pause(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--max-streams", "2", "--max-context", "512", "--streams", "2", "--tokens", "6"]
    assert main(["bench", "pause", *arguments]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["tokens"] == 12
    assert {"model", "host", "command", "versions"} <= report.keys()
    assert report["worst_ms"] >= report["p99_ms"]


def a_round(policy: str, wall: float = 1.0, tokens: tuple[int, ...] = (1, 2)) -> PromptRound:
    return PromptRound(policy, 4, 1, wall, 2, rows=(PromptRow("one", 2, 0, 0, 1.0),), tokens=(tokens,))


def test_every_round_needs_the_tokens_of_off() -> None:
    peer = PromptRound("llama.cpp", 4, 1, 1.0, 2)
    assert differences([a_round("off"), a_round("adaptive"), peer]) == []
    [sentence] = differences([a_round("adaptive", tokens=(1, 3)), a_round("off"), a_round("adaptive"), peer])
    assert "adaptive" in sentence
    assert "one" in sentence


def test_the_fastest_round_of_each_counts() -> None:
    best = fastest([a_round("off", 3.0), a_round("adaptive", 1.0), a_round("off", 2.0)])
    assert [(each.policy, each.wall_s_total) for each in best] == [("off", 2.0), ("adaptive", 1.0)]


def test_ratios_are_between_rounds_of_the_same_turn() -> None:
    off, adaptive = [3.0, 2.0, 8.0], [2.0, 1.0, 8.0]
    rounds = [a_round(policy, wall) for pair in zip(off, adaptive) for policy, wall in zip(("off", "adaptive"), pair)]
    assert against_off("adaptive", rounds) == 1.5
    assert against_off("off", rounds) == 1.0
    assert against_off("adaptive", rounds[1::2]) is None
