"""A drafting and a plain request share steps, and each gives the text it gives alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from real_server import RealServer

ASKED = {"messages": [{"role": "user", "content": "Describe the history of Rome."}], "max_tokens": 120}


def ask(server: RealServer, enabled: bool, seed: int) -> dict[str, Any]:
    body = {**ASKED, "temperature": 0.7, "seed": seed, "ignore_eos": True, "speculative": {"enabled": enabled}}
    return dict(server.post("/v1/chat/completions", **body).json())


def text(response: dict[str, Any]) -> str:
    return str(response["choices"][0]["message"]["content"])


def counters(server: RealServer) -> dict[str, int]:
    status = server.status()
    return {"steps": status["load"]["steps"], **{k: status["speculation"][k] for k in ("drafts", "plain_row_steps")}}


def test_drafting_and_plain_rows_in_the_same_steps(real: RealServer) -> None:
    alone = [ask(real, enabled, seed) for enabled, seed in ((True, 1), (False, 2))]
    before = counters(real)
    with ThreadPoolExecutor(2) as pool:
        drafting, plain = pool.map(lambda each: ask(real, *each), [(True, 1), (False, 2)])
    after = counters(real)
    assert [text(drafting), text(plain)] == [text(each) for each in alone]
    assert text(alone[0]) != text(alone[1])
    assert drafting["timings"]["draft_n"] > 0
    assert drafting["timings"]["draft_n_accepted"] > 0
    assert plain["timings"]["draft_n"] == 0
    assert plain["timings"]["speculation"] == "not drafted: the request turned drafting off"
    grown = {key: after[key] - before[key] for key in before}
    # The plain row drew 120 times; every verification of the other's drafts that shared a step made one step less.
    assert grown["drafts"] > 0
    assert grown["plain_row_steps"] >= 120
    rows = grown["drafts"] + grown["plain_row_steps"]
    assert grown["steps"] < rows - 0.5 * grown["drafts"]
