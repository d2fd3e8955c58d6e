"""`slipstream bench turns`: both ways see the same prompts, what is cached is reported, texts are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slipstream.bench.conversations.chat import ANSWER, MARKED, Conversation
from slipstream.bench.conversations.crowd import CrowdResult
from slipstream.bench.conversations.crowd import summary as crowd_summary
from slipstream.bench.conversations.settings import SUFFIX, TurnsSettings
from slipstream.bench.conversations.turns import num_common
from slipstream.cli import main

Bench = Callable[..., dict[str, Any]]
SMALL = ["--prompt", "300", "--turns", "7", "--added", "20-40", "--new", "6", "--repeats", "2"]
CROWD = ["--streams", "3", "--sessions", "2", "--requests", "4", "--shrink", "64"]


def test_every_scenario(bench: Bench) -> None:
    results = bench("turns", *SMALL, *CROWD)["results"]
    assert list(results) == ["turns", "edit", "fan-out", "agents", "cold", "restart"]
    rows = results["turns"]["turns"]
    assert [row["name"].split()[1] for row in rows] == ["user", *["tool"] * 4, "user", "tool"]
    assert rows[0]["cached_tokens"] == 0
    for row in rows[1:]:
        assert 0 < row["cached_tokens"] <= row["prompt_tokens"] - row["new_tokens"]
        assert row["first_ms"] > 0
    assert rows[5]["new_tokens"] > rows[4]["new_tokens"], "thinking was left out, so more is new"
    assert [row["name"] for row in results["edit"]["turns"]] == ["at 75 %", "at 50 %", "at 25 %"]
    assert all(row["cached_tokens"] for row in results["edit"]["turns"])
    assert results["fan-out"]["read_over_once"] < 1.2, "the prefix was read more than once"
    assert results["cold"]["read_tokens"] == 3 * 300
    agents = results["agents"]
    assert (agents["sessions"], agents["requests"]) == (2, 8)
    assert 0.9 * agents["limit"] < agents["hit_rate"] < 1
    restarted = results["restart"]["turns"]
    assert restarted[0]["cached_tokens"] >= 300, "nothing was stored"
    for name, count in (("turns", 7), ("edit", 3), ("fan-out", 6), ("cold", 6), ("restart", 2)):
        assert (results[name]["same_texts"], results[name]["texts"]) == (count, count)
    assert agents["same_texts"] == 8


def test_a_restart_alone_has_room_for_its_turns(bench: Bench) -> None:
    arguments = ["--prompt", "300", "--turns", "1", "--added", "80-90", "--new", "40", "--scenarios", "restart"]
    rows = bench("turns", *arguments)["results"]["restart"]["turns"]
    assert [row["name"] for row in rows] == ["1 after", "2 after"]
    assert rows[0]["cached_tokens"] >= 256


def test_llama_cpp_has_its_own_conversation(bench: Bench) -> None:
    pytest.importorskip("xllamacpp")
    report = bench("turns", *SMALL, "--scenarios", "turns", "--peer", "--vocab", "300")
    assert all(row["peer_first_ms"] > 0 for row in report["results"]["turns"]["turns"])
    assert report["results"]["turns"]["peer_over_ours"] > 0
    assert "xllamacpp" in report["peer"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--scenarios", "turns,stop"], "no scenario stop"),
        (["--prefix-cache", "off"], "by itself"),
        (["--shrink", "3"], "power of two"),
        (["--scenarios", "cold", "--peer"], "belongs to the scenario turns"),
        (["--scenarios", "agents", "--shrink", "1", "--prompt", "64", "--turns", "1"], "no recorded session fits"),
        (["--scenarios", "turns,agents", "--prompt", "64", "--turns", "1"], "no recorded session fits"),
    ],
)
def test_what_cannot_be_measured(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "turns", "--shape", "tiny", "--random-weights", "--device", "cpu", *arguments]) == 1
    printed = capsys.readouterr()
    assert said in printed.err
    assert not printed.out, "something was measured for nothing"


def test_thinking_stays_until_the_user_writes_again() -> None:
    chat = Conversation([10, 11])
    chat.add("user", [12])
    chat.add("answer", [20, 21, 22, 23])
    chat.add("tool", [13])
    kept = chat.prompt()
    assert [token for token in kept.tokens if token >= 10] == [10, 11, 12, 20, 21, 22, 23, 13]
    ends = {kind: at for at, kind in kept.cache.boundaries}
    assert kept.tokens[: ends["user"]][-1] == 12
    assert len(kept.tokens) == ends["prompt"] + MARKED
    chat.add("user", [14])
    later = chat.prompt()
    assert [token for token in later.tokens if token >= 10] == [10, 11, 12, 22, 23, 13, 14]
    assert num_common(kept.tokens, later.tokens) == ends["user"] + ANSWER


def test_a_crowd_is_compared_round_by_round() -> None:
    def row(cached: bool, read: int, first: tuple[float, ...], tok_s: float) -> CrowdResult:
        return CrowdResult(cached, 400, read, first, tok_s, ((1,), (2,)))

    settings = TurnsSettings(prompt=100, streams=2)
    rows = [row(False, 400, (4.0, 8.0), 10.0), row(True, 228, (1.0, 2.0), 20.0)]
    found = crowd_summary(rows, settings, shared=True)
    assert found["tok_s_ratio"] == 2.0
    assert found["first_token_ratio"] == 4.0
    assert found["read_over_once"] == 228 / (100 + 2 * SUFFIX)
    assert found["last_over_first"] == 2.0
    assert found["same_texts"] == found["texts"] == 2
