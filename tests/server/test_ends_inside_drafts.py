"""Ends inside runs of accepted drafts: exact text, exact usage, nothing of the rest is left over.

At depth 2 with drafts that are right, the output comes as [0], [1 2 3], [4 5 6], ...: the first two of each run are
drafts. Every position is tried, so every position in a run is.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fake_server import MARKERS, FakeServer, make_tokenizer, until
from scripted_runner import ScriptedRunner
from templates import QWEN_XML
from test_protocols import CHAT, stream

from slipstream.engine.contract import RowResult, RowStep

TEXT = "abcdefghijklmnopqrst"
TOKENIZER = make_tokenizer(QWEN_XML, MARKERS)
POSITIONS = range(10)


@pytest.fixture(scope="module", params=[(), (2, 4, 9)], ids=["all right", "some wrong"])
def scripted(request: pytest.FixtureRequest) -> Iterator[FakeServer]:
    """Answers with what the user said."""
    runner = ScriptedRunner(TOKENIZER, lambda prompt: prompt.split("u:")[-1].split("\na:")[0], wrong=request.param)
    with FakeServer(runner, tokenizer=TOKENIZER) as server:
        yield server


def ask(server: FakeServer, text: str, streaming: bool, **more: Any) -> tuple[str, str, str, int]:
    """Thinking, text, finish reason, tokens that count."""
    quiet = {"chat_template_kwargs": {"enable_thinking": False}}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], **quiet, **more}
    if not streaming:
        answer = server.post(CHAT, **body).json()
        [choice] = answer["choices"]
        thought, said = choice["message"].get("reasoning_content", ""), choice["message"]["content"]
        return thought, said, choice["finish_reason"], answer["usage"]["completion_tokens"]
    found = stream(server, CHAT, **body, stream_options={"include_usage": True})
    deltas = [each["choices"][0]["delta"] for each in found if each["choices"]]
    thought, said = ("".join(delta.get(key, "") for delta in deltas) for key in ("reasoning_content", "content"))
    return thought, said, found[-2]["choices"][0]["finish_reason"], found[-1]["usage"]["completion_tokens"]


def nothing_is_left(server: FakeServer) -> None:
    engine, runner = server.engine, server.runner
    assert engine is not None
    assert isinstance(runner, ScriptedRunner)
    until(lambda: engine.snapshot().num_used_blocks == 0 and engine.snapshot().num_running == 0)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("position", POSITIONS)
def test_a_stop_string(scripted: FakeServer, position: int, streaming: bool) -> None:
    stop = TEXT[position : position + 3]
    assert ask(scripted, TEXT, streaming, stop=stop) == ("", TEXT[:position], "stop", position + 3)
    nothing_is_left(scripted)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("position", POSITIONS)
def test_an_end_token(scripted: FakeServer, position: int, streaming: bool) -> None:
    assert ask(scripted, TEXT[:position], streaming) == ("", TEXT[:position], "stop", position + 1)
    nothing_is_left(scripted)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("position", POSITIONS)
def test_a_limit(scripted: FakeServer, position: int, streaming: bool) -> None:
    answer = ask(scripted, TEXT, streaming, max_tokens=position + 1)
    assert answer == ("", TEXT[: position + 1], "length", position + 1)
    nothing_is_left(scripted)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("position", POSITIONS)
def test_the_end_of_thinking(scripted: FakeServer, position: int, streaming: bool) -> None:
    thought = TEXT[:position]
    answer = ask(scripted, f"{thought}</think>\n\nxyz", streaming, chat_template_kwargs={})
    assert answer == (thought, "xyz", "stop", position + 1 + 2 + 3 + 1)
    usage = scripted.post(CHAT, messages=[{"role": "user", "content": f"{thought}</think>x"}]).json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == position + 1
    nothing_is_left(scripted)


@pytest.mark.parametrize("position", POSITIONS)
def test_a_limit_inside_a_marker_that_is_none_yet(scripted: FakeServer, position: int) -> None:
    """What was held back because it might have become a stop string is emitted when nothing follows any more."""
    answer = ask(scripted, TEXT, True, stop=[TEXT[position : position + 5]], max_tokens=position + 2)
    assert answer == ("", TEXT[: position + 2], "length", position + 2)


def test_the_same_on_the_other_protocols(scripted: FakeServer) -> None:
    message = [{"role": "user", "content": f"{TEXT[:4]}</think>{TEXT}"}]
    stop = TEXT[5:8]
    answer = scripted.post("/v1/messages", messages=message, max_tokens=99, stop_sequences=[stop],
                         thinking={"type": "enabled"}).json()  # fmt: skip
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
    assert (answer["content"][0]["thinking"], answer["content"][1]["text"]) == (TEXT[:4], TEXT[:5])
    assert (answer["stop_sequence"], answer["usage"]["output_tokens"]) == (stop, 4 + 1 + 8)
    answer = scripted.post("/v1/responses", input=message, max_output_tokens=4 + 1 + 6).json()
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
    assert answer["output"][1]["content"][0]["text"] == TEXT[:6]
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 5
    assert answer["status"] == "incomplete"
    nothing_is_left(scripted)


class FaultyRunner(ScriptedRunner):
    """A row whose prompt says so cannot go on after its fourth token."""

    def _run(self, step: RowStep) -> RowResult:
        row = self.rows[step.slot]
        start, _ = self._outputs[id(row)]
        if "FAULT" in self._tokenizer.decode(row.tokens[:start]) and len(row.tokens) - start >= 4:
            return RowResult(step.slot, 0, (), (), fault="nothing may follow")
        return super()._run(step)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_fault_ends_its_own_stream_with_its_text(streaming: bool) -> None:
    tokenizer = make_tokenizer()
    runner = FaultyRunner(tokenizer, lambda prompt: TEXT)
    with FakeServer(runner, tokenizer=tokenizer) as server, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, server, word, streaming) for word in ("FAULT", "fine", "FAULT", "fine")]
        faulty, fine, *others = [each.result() for each in asked]
        assert faulty == others[0] == ("", TEXT[:4], "error", 4)
        assert fine == others[1] == ("", TEXT, "stop", len(TEXT) + 1)
        whole = {"messages": [{"role": "user", "content": "FAULT"}]}
        assert server.post(CHAT, **whole).json()["choices"][0]["error"] == "nothing may follow"
        answer = server.post("/v1/messages", **whole, max_tokens=9).json()
        assert (answer["stop_reason"], answer["error"]) == ("error", "nothing may follow")
        failed = server.post("/v1/responses", input="FAULT").json()
        assert (failed["status"], failed["error"]["message"]) == ("failed", "nothing may follow")
        nothing_is_left(server)
