"""What goes over the wire, by protocol: same text streamed and whole, usage, finish reasons, refusals by name."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from fake_server import TOKENIZER, FakeServer, asked, events, said

from slipstream.server.service.settings import ServerConfig

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
ANSWER = said(asked("hello"), 5, 12)
PATHS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 12},
    "/v1/completions": {"prompt": asked("hello"), "max_tokens": 12},
    "/v1/responses": {"input": "hello", "max_output_tokens": 12},
    "/v1/messages": {"messages": HELLO, "max_tokens": 12},
}


def whole_text(path: str, body: dict[str, Any]) -> str:
    if path == CHAT:
        return str(body["choices"][0]["message"]["content"])
    if path == "/v1/completions":
        return str(body["choices"][0]["text"])
    return str(body["output"][0]["content"][0]["text"] if path == "/v1/responses" else body["content"][0]["text"])


def streamed_text(path: str, found: list[dict[str, Any]]) -> str:
    if path == CHAT:
        return "".join(each["choices"][0]["delta"].get("content", "") for each in found if each["choices"])
    if path == "/v1/completions":
        return "".join(each["choices"][0]["text"] for each in found if each["choices"])
    if path == "/v1/responses":
        return "".join(each["delta"] for each in found if each["type"] == "response.output_text.delta")
    return "".join(each["delta"]["text"] for each in found if each["type"] == "content_block_delta")


def stream(server: FakeServer, path: str, **body: Any) -> list[dict[str, Any]]:
    with httpx.stream("POST", server.url + path, json={**body, "stream": True}, timeout=300) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return events(response.iter_lines())


@pytest.mark.parametrize("path", PATHS)
def test_streamed_and_whole_are_the_same_text(fake: FakeServer, path: str) -> None:
    body = PATHS[path] | {"seed": 5}
    whole = fake.post(path, **body)
    assert whole.status_code == 200, whole.text
    assert whole_text(path, whole.json()) == ANSWER
    assert streamed_text(path, stream(fake, path, **body)) == ANSWER


@pytest.mark.parametrize("path", PATHS)
def test_timings_count_every_token(fake: FakeServer, path: str) -> None:
    response = fake.post(path, **PATHS[path], seed=5).json()
    timings = response["timings"]
    assert timings["predicted_n"] == 12
    assert timings["prompt_n"] == len(asked("hello"))
    assert timings["draft_n"] == sum(timings["drafted_per_position"]) > 0
    assert timings["draft_n_accepted"] == sum(timings["accepted_per_position"]) > 0
    assert re.match(r"drafted in (every step|\d+ % of steps), \d\.\d tokens a step", timings["speculation"])
    assert 1.0 < timings["tokens_per_step"] <= 3.0
    usage = response["usage"]
    assert usage.get("completion_tokens", usage.get("output_tokens")) == 12
    off = fake.post(path, **PATHS[path], seed=5, speculative={"enabled": False}).json()
    assert whole_text(path, off) == ANSWER
    assert off["timings"]["draft_n"] == 0
    assert off["timings"]["speculation"] == "not drafted: the request turned drafting off"
    assert off["timings"]["tokens_per_step"] == 1.0


def test_a_step_of_several_tokens_streams_them_all(fake: FakeServer) -> None:
    found = stream(fake, CHAT, messages=HELLO, max_tokens=40, seed=5, return_origins=True)
    origins = [pair for each in found for choice in each["choices"] for pair in choice.get("origins", [])]
    assert "".join(text for text, _ in origins) == streamed_text(CHAT, found) == said(asked("hello"), 5, 40)
    ks = [k for _, k in origins]
    assert {1, 2} & set(ks)
    for before, k in zip([0, *ks], ks):
        assert k in (0, 1, before + 1)
    timings = found[-1]["timings"]
    assert len([k for k in ks if k]) == timings["draft_n_accepted"]
    assert [ks.count(i + 1) for i in range(2)] == timings["accepted_per_position"]


def test_usage_is_streamed_on_demand(fake: FakeServer) -> None:
    plain = stream(fake, CHAT, messages=HELLO, max_tokens=3, seed=5)
    assert not any("usage" in each for each in plain)
    last = stream(fake, CHAT, messages=HELLO, max_tokens=3, seed=5, stream_options={"include_usage": True})[-1]
    assert last["choices"] == []
    counts = {"prompt_tokens": 8, "completion_tokens": 3, "total_tokens": 11}
    assert last["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 0}}


def test_an_end_token_ends_and_counts(fake: FakeServer) -> None:
    seed = next(seed for seed in range(1000) if len(said(asked("hello"), seed, 60)) < 20)
    text = said(asked("hello"), seed, 60)
    response = fake.post(CHAT, messages=HELLO, max_tokens=60, seed=seed).json()
    assert response["choices"][0]["message"]["content"] == text
    assert response["choices"][0]["finish_reason"] == "stop"
    assert response["usage"]["completion_tokens"] == len(text) + 1
    assert fake.post("/v1/messages", messages=HELLO, max_tokens=60, seed=seed).json()["stop_reason"] == "end_turn"
    on = fake.post(CHAT, messages=HELLO, max_tokens=60, seed=seed, ignore_eos=True).json()
    assert on["usage"]["completion_tokens"] == 60


@pytest.mark.parametrize("streaming", [False, True])
def test_stop_strings(fake: FakeServer, streaming: bool) -> None:
    text = said(asked("hello"), 5, 60)
    stop = text[7:10]
    before = text[: text.index(stop)]
    aborted = fake.finished("abort")
    body = {"messages": HELLO, "max_tokens": 60, "seed": 5}
    if streaming:
        found = stream(fake, CHAT, **body, stop=[stop, "never"], stream_options={"include_usage": True})
        assert streamed_text(CHAT, found) == before
        usage, reason = found[-1]["usage"], found[-2]["choices"][0]["finish_reason"]
    else:
        response = fake.post(CHAT, **body, stop=stop).json()
        assert response["choices"][0]["message"]["content"] == before
        usage, reason = response["usage"], response["choices"][0]["finish_reason"]
    assert reason == "stop"
    assert usage["completion_tokens"] == len(before) + 3
    assert fake.finished("abort") == aborted
    message = fake.post("/v1/messages", **body, stop_sequences=[stop]).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"n": 17}, "n"),
    (CHAT, {"n": 0}, "n"),
    (CHAT, {"logprobs": 1}, "logprobs"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "two words"}}]}, "tools.0.function.name"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (CHAT, {"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    (CHAT, {"guided_json": "{"}, "guided_json"),
    (CHAT, {"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    (CHAT, {"bad_words": [""]}, "bad_words"),
    (CHAT, {"min_tokens": 13}, "min_tokens"),
    (CHAT, {"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
    (CHAT, {"messages": [{"role": "tool", "tool_call_id": "x"}]}, "messages.0.content"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [
        {"id": "x", "type": "function", "function": {"name": "f", "arguments": "["}}]}]},
     "messages.0.tool_calls.0.arguments"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
     "messages.0.content.0"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"chat_template": "{{ 1 }}"}, "chat_template"),
    (CHAT, {"temperature": float("1e400")}, "temperature"),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"max_tokens": -2}, "max_tokens"),
    (CHAT, {"mirostat": 2}, "mirostat"),
    (CHAT, {"typical_p": 0.9}, "typical_p"),
    (CHAT, {"lora_path": "x"}, "lora_path"),
    (CHAT, {"skip_special_tokens": False}, "skip_special_tokens"),
    (CHAT, {"reasoning_format": "none"}, "reasoning_format"),
    (CHAT, {"add_generation_prompt": False}, "add_generation_prompt"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools.0.function"),
    (CHAT, {"tool_choice": "required", "tools": [{"type": "custom", "name": "x"}]}, "tool_choice"),
    ("/v1/completions", {"prompt": ["a", 1]}, "prompt"),
    ("/v1/completions", {"prompt": []}, "prompt"),
    ("/v1/messages", {"tools": [{"name": "f"}]}, "tools.0.input_schema"),
    ("/v1/messages", {"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
    (CHAT, {"max_tokens": "many"}, "max_tokens"),
    (CHAT, {"stop": [""]}, "stop"),
    (CHAT, {"stop": ["x"] * 17}, "stop"),
    (CHAT, {"seed": 1 << 64}, "seed"),
    (CHAT, {"logit_bias": {"x": 1}}, "logit_bias.x"),
    (CHAT, {"speculative": {"depth": 9}}, "speculative.depth"),
    (CHAT, {"speculative": {"depth": 5}}, "speculative.depth"),
    (CHAT, {"speculative": {"p_min": 2}}, "speculative.p_min"),
    ("/v1/completions", {"suffix": "x"}, "suffix"),
    ("/v1/completions", {"best_of": 2}, "best_of"),
    ("/v1/completions", {"logprobs": True}, "logprobs"),
    ("/v1/responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
    ("/v1/responses", {"background": True}, "background"),
    ("/v1/responses", {"text": {"format": {"type": "xml"}}}, "text.format"),
    ("/v1/messages", {"tool_choice": {"type": "any"}}, "tool_choice"),
    ("/v1/messages", {"messages": [{"role": "assistant", "content": [
        {"type": "tool_result", "tool_use_id": "x"}]}]}, "messages.0.content.0"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "more", "name"), REFUSED)
def test_what_we_cannot_do_is_refused_by_name(fake: FakeServer, path: str, more: dict[str, Any], name: str) -> None:
    body = PATHS[path] | more
    if more.get("temperature") == float("inf"):
        response = httpx.post(
            fake.url + path,
            content=b'{"messages":[],"temperature":1e400}',
            headers={"content-type": "application/json"},
            timeout=300,
        )
    else:
        response = fake.post(path, **body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert name in error["message"]
    assert "pydantic" not in response.text
    if path != "/v1/messages":
        assert error["param"].startswith(name)
        assert error["type"] == "invalid_request_error"
    else:
        assert response.json()["type"] == "error"


HARMLESS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"n": 1, "logprobs": False, "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}}),
    (CHAT, {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "parallel_tool_calls": True}),
    (CHAT, {"messages": [{"role": "user", "content": [
        {"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]}),
    (CHAT, {"temperature": None, "max_completion_tokens": None, "stop": None, "speculative": None, "n": None}),
    ("/v1/completions", {"n": 1, "best_of": 1, "echo": False, "prompt": [asked("hello")]}),
    ("/v1/completions", {"prompt": TOKENIZER.encode(asked("hello"))}),
    ("/v1/responses", {"store": False, "tools": [], "text": {"format": {"type": "text"}}, "truncation": "disabled"}),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]}),
    ("/v1/messages", {"metadata": {"user_id": "u"}, "tools": [], "thinking": {"type": "disabled"}}),
    ("/v1/messages", {"messages": [{"role": "user", "content": [
        {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]}]}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "more"), HARMLESS)
def test_what_asks_for_nothing_is_taken(fake: FakeServer, path: str, more: dict[str, Any]) -> None:
    response = fake.post(path, **(PATHS[path] | more), seed=5)
    assert response.status_code == 200, response.text
    assert whole_text(path, response.json()) == ANSWER


def test_an_answer_can_be_sent_back(fake: FakeServer) -> None:
    message = fake.post(CHAT, messages=HELLO, max_tokens=4).json()["choices"][0]["message"]
    assert fake.post(CHAT, messages=[*HELLO, message, *HELLO], max_tokens=4).status_code == 200
    item = fake.post("/v1/responses", input="hello", max_output_tokens=4).json()["output"][0]
    again = [{"role": "user", "content": "hello"}, item, {"role": "user", "content": "hello"}]
    assert fake.post("/v1/responses", input=again, max_output_tokens=4).status_code == 200


def test_the_order_of_a_response_s_events(fake: FakeServer) -> None:
    found = stream(fake, "/v1/responses", input="hello", max_output_tokens=3, seed=5)
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    kinds = [each["type"].removeprefix("response.") for each in found]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert found[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert found[-1]["response"]["usage"]["output_tokens"] == 3


def test_the_error_for_a_long_prompt_has_both_numbers(fake: FakeServer) -> None:
    for path, body in (("/v1/completions", {"prompt": "x" * 500}), ("/v1/messages", {
        "messages": [{"role": "user", "content": "x" * 497}], "max_tokens": 1})):  # fmt: skip
        response = fake.post(path, **body)
        assert response.status_code == 400
        assert re.search(r"500 tokens.*at most 128", response.json()["error"]["message"])


def test_tokens_there_and_back(fake: FakeServer) -> None:
    response = fake.post("/tokenize", prompt="hello").json()
    assert response == {"tokens": TOKENIZER.encode("hello"), "count": 5, "max_model_len": 128}
    assert fake.post("/tokenize", content="hello").json() == response
    assert fake.post("/tokenize", messages=HELLO).json()["tokens"] == TOKENIZER.encode(asked("hello"))
    assert fake.post("/tokenize").status_code == 400
    assert fake.post("/detokenize", tokens=response["tokens"]).json() == {"prompt": "hello", "content": "hello"}
    counted = fake.post("/v1/messages/count_tokens", messages=HELLO, system="be brief").json()
    assert counted == {"input_tokens": len("s:be brief\nu:hello\n")}


def test_a_text_of_millions_of_tokens_is_not_listed(fake: FakeServer) -> None:
    response = fake.post("/tokenize", prompt="a" * 3_000_000)
    assert response.status_code == 400
    assert "more than 131072 tokens" in response.json()["error"]["message"]


def test_models(fake: FakeServer) -> None:
    [entry] = fake.get("/v1/models").json()["data"]
    assert (entry["id"], entry["object"], entry["max_model_len"]) == ("fake", "model", 128)
    assert fake.get("/v1/models/fake").json() == entry
    assert fake.get("/v1/models/other").status_code == 404
    assert fake.post(CHAT, messages=HELLO, model="fake", max_tokens=1).status_code == 200
    assert fake.post(CHAT, messages=HELLO, model="gpt-9", max_tokens=1).json()["model"] == "gpt-9"
    assert fake.post(CHAT, messages=HELLO, model="", max_tokens=1).json()["model"] == "fake"


def test_a_served_name_insists() -> None:
    with FakeServer(config=ServerConfig(port=0, names=("qwen", "coder"))) as server:
        for name, status in (("qwen", 200), ("fake", 200), ("gpt-9", 404)):
            assert server.post(CHAT, messages=HELLO, model=name, max_tokens=1).status_code == status
        error = server.post(CHAT, messages=HELLO, model="gpt-9").json()["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert error["message"] == "there is no model 'gpt-9' here; this server has 'fake', 'qwen', 'coder'"
        assert server.get("/v1/models/gpt-9").json()["error"] == error


def test_nothing_at_a_path_and_wrong_methods(fake: FakeServer) -> None:
    assert fake.get("/nowhere").json()["error"]["message"] == "there is nothing at this path"
    wrong = fake.get("/v1/messages")
    assert (wrong.status_code, wrong.json()["type"]) == (405, "error")


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        (CHAT, "POST"),
        ("/v1/messages", "POST"),
        ("/api/chat", "POST"),
        ("/v1/models", "GET, HEAD"),
        ("/", "GET, HEAD"),
        ("/page/main.js", "GET, HEAD"),
    ],
)
def test_a_wrong_method_is_told_the_right_ones(fake: FakeServer, path: str, allowed: str) -> None:
    for method in {"GET", "POST", "PUT", "DELETE"} - set(allowed.split(", ")):
        response = httpx.request(method, fake.url + path, timeout=300)
        assert (response.status_code, response.headers["allow"]) == (405, allowed)
        assert f"this path only takes {allowed.replace(', ', ' or ')}" in response.text
