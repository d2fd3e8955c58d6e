"""An agent at work: the real `openai` and `anthropic` clients, tools over several turns, a model that has a script.

Both forms of calls, thinking before each, streamed and whole: every protocol gives the same answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest
from fake_server import MARKERS, FakeServer, make_tokenizer
from scripted_runner import ScriptedRunner
from templates import HERMES, QWEN_XML, hermes_call, xml_call
from test_protocols import CHAT, stream

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
ASK = "Weather in Paris and Oslo?"
FIRST, SECOND = {"city": "Paris", "days": 2}, {"city": 'O"slo'}
ANSWER = "Sun in Paris, snow in Oslo."


@dataclass(frozen=True)
class Form:
    template: str
    call: Callable[..., str]


FORMS = {"hermes": Form(HERMES, hermes_call), "xml": Form(QWEN_XML, xml_call)}


def script(form: Form, prompt: str) -> str:
    """Two calls at once, then another, then the answer; what it has seen is what the template shows."""
    thinking = "" if prompt.endswith("</think>\n\n") else "hm\n</think>\n\n"
    if not prompt.rstrip().endswith("think>"):
        thinking = f"<think>\n{thinking}"
    if "t:snow" in prompt:
        return f"{thinking}{ANSWER}"
    if "t:sun" in prompt:
        return f"{thinking}{form.call('weather', **SECOND)}"
    return f"{thinking}Let me see.\n\n{form.call('weather', **FIRST)}\n{form.call('time')}"


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    return FORMS[request.param]


@pytest.fixture(scope="module")
def server(form: Form) -> Iterator[FakeServer]:
    tokenizer = make_tokenizer(form.template, MARKERS)
    with FakeServer(ScriptedRunner(tokenizer, lambda prompt: script(form, prompt)), tokenizer=tokenizer) as server:
        yield server


def prompts(server: FakeServer) -> list[str]:
    assert isinstance(server.runner, ScriptedRunner)
    return server.runner.prompts


# OpenAI's chat.

CHAT_TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Look it up", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time"}},
]


@pytest.fixture(scope="module")
def chatgpt(server: FakeServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client


def chat_turn(client: openai.OpenAI, messages: list[Any], streaming: bool) -> Any:
    """The message of one turn, put together by the client."""
    if not streaming:
        response = client.chat.completions.create(model="fake", messages=messages, tools=CHAT_TOOLS)
        return response.choices[0].message, response.choices[0].finish_reason
    with client.chat.completions.stream(model="fake", messages=messages, tools=CHAT_TOOLS) as events:
        thought = [
            event.chunk.choices[0].delta.model_extra.get("reasoning_content", "")
            for event in events
            if event.type == "chunk" and event.chunk.choices
        ]
        response = events.get_final_completion()
    message = response.choices[0].message
    message.reasoning_content = "".join(thought)
    return message, response.choices[0].finish_reason


@pytest.mark.parametrize("streaming", [False, True])
def test_chat(server: FakeServer, chatgpt: openai.OpenAI, streaming: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": ASK}]
    results = iter([["sun", "noon"], ["snow"]])
    calls = []
    while True:
        message, reason = chat_turn(chatgpt, messages, streaming)
        assert message.reasoning_content == "hm"
        if not message.tool_calls:
            break
        assert reason == "tool_calls"
        calls += [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
        messages.append(message.model_dump(exclude_none=True))
        for call in messages[-1]["tool_calls"]:
            call["function"].pop("parsed_arguments", None)  # the client's own reading
        for call, result in zip(message.tool_calls, next(results), strict=True):
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert calls == [("weather", FIRST), ("time", {}), ("weather", SECOND)]
    assert (message.content, reason) == (ANSWER, "stop")
    last = prompts(server)[-1]
    assert last.startswith('tools: {"name": "weather", "description": "Look it up"')
    assert last.count("<tool_call>") == 3
    assert "a:<think>\nhm\n</think>\n\nLet me see.<tool_call>" in last
    assert "t:sun\nt:noon\na:<think>" in last


def test_chat_whole_and_streamed_are_the_same(server: FakeServer) -> None:
    body = {"messages": [{"role": "user", "content": ASK}], "tools": CHAT_TOOLS}
    [whole] = server.post(CHAT, **body).json()["choices"]
    deltas = [each["choices"][0]["delta"] for each in stream(server, CHAT, **body) if each["choices"]]
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls", [])]
    names = {piece["index"]: piece["function"]["name"] for piece in pieces if "id" in piece}
    arguments = {i: "".join(p["function"]["arguments"] for p in pieces if p["index"] == i) for i in names}
    expected = [(call["function"]["name"], call["function"]["arguments"]) for call in whole["message"]["tool_calls"]]
    assert [(names[i], arguments[i]) for i in sorted(names)] == expected
    assert "".join(delta.get("content") or "" for delta in deltas) == whole["message"]["content"] == "Let me see."


def test_one_call_at_a_time(server: FakeServer) -> None:
    body = {"messages": [{"role": "user", "content": ASK}], "tools": CHAT_TOOLS, "parallel_tool_calls": False}
    response = server.post(CHAT, **body).json()
    assert [call["function"]["name"] for call in response["choices"][0]["message"]["tool_calls"]] == ["weather"]
    assert response["choices"][0]["finish_reason"] == "tool_calls"
    both = server.post(CHAT, **(body | {"parallel_tool_calls": True})).json()
    assert response["usage"]["completion_tokens"] < both["usage"]["completion_tokens"]


def test_without_tools_a_call_is_text(server: FakeServer, form: Form) -> None:
    for more in ({}, {"tools": CHAT_TOOLS, "tool_choice": "none"}):
        [choice] = server.post(CHAT, messages=[{"role": "user", "content": ASK}], **more).json()["choices"]
        assert form.call("weather", **FIRST) in choice["message"]["content"]
        assert choice["finish_reason"] == "stop"
        assert not prompts(server)[-1].startswith("tools:")


def test_a_call_that_is_cut_off(server: FakeServer) -> None:
    body = {"messages": [{"role": "user", "content": ASK}], "tools": CHAT_TOOLS}
    whole = server.post(CHAT, **body).json()["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    for most in range(20, 70, 7):
        [choice] = server.post(CHAT, **body, max_tokens=most).json()["choices"]
        assert choice["finish_reason"] == "length"
        calls = choice["message"].get("tool_calls", [])
        assert all(whole.startswith(call["function"]["arguments"]) for call in calls[:1])


# Anthropic's messages.

CLAUDE_TOOLS: list[Any] = [
    {"name": "weather", "description": "Look it up", "input_schema": SCHEMA},
    {"name": "time", "input_schema": {"type": "object", "properties": {}}},
]


@pytest.fixture(scope="module")
def claude(server: FakeServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=300) as client:
        yield client


def claude_turn(client: anthropic.Anthropic, messages: list[Any], streaming: bool, thinking: Any) -> Any:
    asked = {"model": "fake", "messages": messages, "tools": CLAUDE_TOOLS, "max_tokens": 500, "thinking": thinking}
    if not streaming:
        return client.messages.create(**asked)
    with client.messages.stream(**asked) as events:
        return events.get_final_message()


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("thinks", [True, False])
def test_messages(server: FakeServer, claude: anthropic.Anthropic, streaming: bool, thinks: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": ASK}]
    thinking = {"type": "enabled", "budget_tokens": 1024} if thinks else {"type": "disabled"}
    results = iter([["sun", "noon"], ["snow"]])
    calls = []
    while True:
        response = claude_turn(claude, messages, streaming, thinking)
        kinds = [block.type for block in response.content]
        assert kinds[:1] == (["thinking"] if thinks else kinds[:1])
        assert not thinks or (response.content[0].thinking, bool(response.content[0].signature)) == ("hm", True)
        used = [block for block in response.content if block.type == "tool_use"]
        if not used:
            break
        assert response.stop_reason == "tool_use"
        calls += [(block.name, block.input) for block in used]
        messages.append({"role": "assistant", "content": response.model_dump(exclude_none=True)["content"]})
        answers = [
            {"type": "tool_result", "tool_use_id": block.id, "content": result}
            for block, result in zip(used, next(results), strict=True)
        ]
        messages.append({"role": "user", "content": answers})
    assert calls == [("weather", FIRST), ("time", {}), ("weather", SECOND)]
    assert (response.content[-1].text, response.stop_reason) == (ANSWER, "end_turn")
    assert kinds == (["thinking", "text"] if thinks else ["text"])
    assert "t:sun\nt:noon\na:" in prompts(server)[-1]
    counted = claude.messages.count_tokens(model="fake", messages=messages, tools=CLAUDE_TOOLS, thinking=thinking)
    assert counted.input_tokens == response.usage.input_tokens


# OpenAI's responses.

RESPONSE_TOOLS: list[Any] = [
    {"type": "function", "name": "weather", "description": "Look it up", "parameters": SCHEMA, "strict": False},
    {"type": "function", "name": "time", "parameters": {"type": "object", "properties": {}}, "strict": False},
]


@pytest.mark.parametrize("streaming", [False, True])
def test_responses(server: FakeServer, chatgpt: openai.OpenAI, streaming: bool) -> None:
    items: list[Any] = [{"role": "user", "content": ASK}]
    results = iter([["sun", "noon"], ["snow"]])
    calls = []
    while True:
        asked = {"model": "fake", "input": items, "tools": RESPONSE_TOOLS}
        if streaming:
            with chatgpt.responses.stream(**asked) as events:
                response = list(events)[-1].response
        else:
            response = chatgpt.responses.create(**asked)
        assert (response.output[0].type, response.output[0].content[0].text) == ("reasoning", "hm")
        used = [item for item in response.output if item.type == "function_call"]
        if not used:
            break
        calls += [(item.name, json.loads(item.arguments)) for item in used]
        items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
        for item in items:
            for part in item.get("content") or [] if isinstance(item.get("content"), list) else []:
                part.pop("parsed", None)
        items += [
            {"type": "function_call_output", "call_id": item.call_id, "output": result}
            for item, result in zip(used, next(results), strict=True)
        ]
    assert calls == [("weather", FIRST), ("time", {}), ("weather", SECOND)]
    assert (response.output_text, response.status) == (ANSWER, "completed")
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    assert "a:<think>\nhm\n</think>\n\nLet me see.<tool_call>" in prompts(server)[-1]


# Thinking, on and off.


@pytest.mark.parametrize("off", [{"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}])
def test_thinking_can_be_switched_off(server: FakeServer, off: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "t:snow"}]}
    on = server.post(CHAT, **body).json()
    assert on["choices"][0]["message"]["reasoning_content"] == "hm"
    message = server.post(CHAT, **body, **off).json()["choices"][0]["message"]
    assert "reasoning_content" not in message
    assert message["content"] == ANSWER
    response = server.post("/v1/responses", input="t:snow", reasoning={"effort": "none"}).json()
    assert [item["type"] for item in response["output"]] == ["message"]


def test_origins_stay_with_their_part(server: FakeServer) -> None:
    found = stream(server, CHAT, messages=[{"role": "user", "content": "t:snow"}], return_origins=True)
    choices = [choice for each in found for choice in each["choices"] if "origins" in choice]
    for choice in choices:
        text = choice["delta"].get("content", choice["delta"].get("reasoning_content"))
        assert "".join(piece for piece, _ in choice["origins"]) == text
    assert {k for choice in choices for _, k in choice["origins"]} == {0, 1, 2}
