"""Tool calls that clients send back, in their own spelling, are rendered as the model wrote them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fake_server import MARKERS, WAIT, FakeServer, make_tokenizer
from scripted_runner import ScriptedRunner

from slipstream.server.service.sampled_calls import SampledCalls
from slipstream.server.service.settings import ServerConfig
from slipstream.server.text.json_text import same_json
from slipstream.server.text.markup.calls import SampledCall

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
_HEAD = (
    "{% for t in tools or [] %}{{ t.function.name }}{{ '\\n' }}{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
)
_TAIL = "{% endfor %}{% if m.role == 'assistant' %}<|end|>{% endif %}{{ '\\n' }}{% endfor %}assistant:"
_JSON = '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": %s}\n</tool_call>'
# As Qwen3's, which prints arguments that are a text as they are; as Qwen2.5's, which does not.
HERMES = (
    _HEAD
    + _JSON
    % (
        "{% if c.function.arguments is string %}{{ c.function.arguments }}"
        "{% else %}{{ c.function.arguments | tojson }}{% endif %}"
    )
    + _TAIL
)
HERMES_OBJECTS = _HEAD + _JSON % "{{ c.function.arguments | tojson }}" + _TAIL
# As Qwen3.5's; and one that writes every value as JSON.
_XML = (
    "<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}"
    "<parameter={{ k }}>\n%s\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
XML = (
    _HEAD
    + _XML.replace("%s", "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}")
    + _TAIL
)
XML_JSON = _HEAD + _XML.replace("%s", "{{ v | tojson }}") + _TAIL
NO_TOOLS = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% if m.role == 'assistant' %}<|end|>{% endif %}" + (
    "{{ '\\n' }}{% endfor %}assistant:"
)

CACHE = {"keep_grid": 4, "num_states": 32}
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
ODD_JSON = (
    '<tool_call>\n{"name": "f", "arguments": {"path":"a b",  "n": 1.50, "deep":{"z":1,"a": [1,2]}}}\n</tool_call>'
)
PLAIN_JSON = (
    '<tool_call>\n{"name": "f", "arguments": {"path": "a b", "n": 1.0, "deep": {"z": 1, "a": [1, 2]}}}\n</tool_call>'
)
ODD_XML = (
    "<tool_call>\n<function=f>\n<parameter=path>\na\n\n  b\n</parameter>\n<parameter=n>\n1.50\n</parameter>\n"
    '<parameter=deep>\n{"z":1,"a": [1,2]}\n</parameter>\n<parameter=on>\ntrue\n</parameter>\n</function>\n</tool_call>'
)
PLAIN_XML = (
    '<tool_call>\n<function=f>\n<parameter=word>\n"a b"\n</parameter>\n<parameter=n>\n2\n</parameter>\n</function>\n'
    "</tool_call>"
)


def shuffled(value: Any) -> Any:
    """The same JSON value as another client would write it: keys in another order, whole numbers without a point."""
    if isinstance(value, dict):
        return {key: shuffled(value[key]) for key in sorted(value, reverse=True)}
    if isinstance(value, list):
        return [shuffled(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def respelled(arguments: str) -> str:
    return json.dumps(shuffled(json.loads(arguments)), separators=(",", ":"))


Turn = Callable[[FakeServer], Any]


def chat_turns(server: FakeServer, change: Callable[[dict[str, Any]], None] = lambda call: None) -> int:
    """How many tokens of the second prompt came from the cache."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    message = post(server, CHAT, messages=messages, tools=tools)["choices"][0]["message"]
    for call in message["tool_calls"]:
        call["function"]["arguments"] = respelled(call["function"]["arguments"])
        change(call)
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "5"} for call in message["tool_calls"]]
    found = post(server, CHAT, messages=[*messages, message, *results], tools=tools)
    return int(found["usage"]["prompt_tokens_details"]["cached_tokens"])


def response_turns(server: FakeServer) -> None:
    tools = [{"type": "function", "name": "f", "parameters": SCHEMA}]
    items: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    output = post(server, RESPONSES, input=items, tools=tools)["output"]
    for item in output:
        if item["type"] == "function_call":
            item["arguments"] = respelled(item["arguments"])
            items = [*items, item, {"type": "function_call_output", "call_id": item["call_id"], "output": "5"}]
    post(server, RESPONSES, input=items, tools=tools)


def message_turns(server: FakeServer) -> None:
    more = {"tools": [{"name": "f", "input_schema": SCHEMA}], "max_tokens": 500}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    content = post(server, MESSAGES, messages=messages, **more)["content"]
    blocks = [{**block, "input": shuffled(block["input"])} if "input" in block else block for block in content]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "5"} for block in blocks if "input" in block
    ]
    answer = {"role": "assistant", "content": blocks}
    post(server, MESSAGES, messages=[*messages, answer, {"role": "user", "content": results}], **more)


def post(server: FakeServer, path: str, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
    response = httpx.post(server.url + path, json=body, headers=headers, timeout=WAIT)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def serving(template: str, written: str, config: ServerConfig | None = None) -> FakeServer:
    tokenizer = make_tokenizer(template, MARKERS)
    runner = ScriptedRunner(tokenizer, lambda prompt: "done" if "tool" in prompt.split("go")[-1] else written, **CACHE)
    return FakeServer(runner, tokenizer=tokenizer, config=config)


def repeats(server: FakeServer, written: str) -> bool:
    """Whether the second prompt begins with the first one and its answer, in tokens."""
    assert isinstance(server.runner, ScriptedRunner)
    first, second = (server.tokenizer.encode(prompt) for prompt in server.runner.prompts[-2:])
    sampled = [*first, *server.tokenizer.encode(f"{written}<|end|>")]
    return second[: len(sampled)] == sampled


EXACT = [(HERMES, ODD_JSON), (HERMES, PLAIN_JSON), (HERMES_OBJECTS, PLAIN_JSON), (XML, ODD_XML), (NO_TOOLS, ODD_JSON)]


@pytest.mark.parametrize(("template", "written"), EXACT)
@pytest.mark.parametrize("turns", [chat_turns, response_turns, message_turns])
def test_the_next_prompt_repeats_prompt_and_answer(turns: Turn, template: str, written: str) -> None:
    with serving(template, written) as server:
        turns(server)
        assert repeats(server, written)


def test_the_next_turn_starts_inside_the_answer() -> None:
    with serving(XML, ODD_XML) as server:
        assert isinstance(server.runner, ScriptedRunner)
        num_cached = chat_turns(server)
        answer = len(server.tokenizer.encode(ODD_XML))
        prompt = len(server.tokenizer.encode(server.runner.prompts[-2]))
        assert prompt + answer - 64 <= num_cached <= prompt + answer
    with serving(XML, ODD_XML) as server:
        assert chat_turns(server, reidentify) < num_cached, "a call that is not known is rendered otherwise"


def test_several_calls_in_one_answer() -> None:
    written = PLAIN_JSON + PLAIN_JSON.replace("a b", "c")
    with serving(HERMES, written) as server:
        chat_turns(server)
        assert repeats(server, written)


def test_values_that_a_template_writes_as_json_stay_values() -> None:
    """A sampled text in place of a number would be rendered with quotation marks."""
    with serving(XML_JSON, PLAIN_XML) as server:
        chat_turns(server)
        assert repeats(server, PLAIN_XML)


def rename(call: dict[str, Any]) -> None:
    call["function"]["name"] = "g"


def rewrite(call: dict[str, Any]) -> None:
    arguments = json.loads(call["function"]["arguments"])
    call["function"]["arguments"] = json.dumps(arguments | {"n": True})


def reidentify(call: dict[str, Any]) -> None:
    call["id"] = "call_0123456789abcdef01234567"


@pytest.mark.parametrize("change", [rename, rewrite, reidentify])
def test_a_call_that_was_changed_is_rendered_as_it_was_sent(change: Callable[[dict[str, Any]], None]) -> None:
    with serving(HERMES, ODD_JSON) as server:
        chat_turns(server, change)
        assert not repeats(server, ODD_JSON)
        assert isinstance(server.runner, ScriptedRunner)
        assert ('"name": "g"' in server.runner.prompts[-1]) == (change is rename)
        assert ('"n": true' in server.runner.prompts[-1]) == (change is rewrite)


def test_others_do_not_get_the_sampled_text() -> None:
    """Of another key, a call with the same id is a stranger's."""
    headers = [{"x-api-key": "one"}, {"x-api-key": "two"}]
    config = ServerConfig(port=0, api_keys=("one", "two"))
    with serving(HERMES, ODD_JSON, config) as server:
        for other, exact in ((headers[0], True), (headers[1], False)):
            chat_turns_of_two(server, headers[0], other)
            assert repeats(server, ODD_JSON) == exact


def chat_turns_of_two(server: FakeServer, first: dict[str, str], second: dict[str, str]) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    message = post(server, CHAT, first, messages=messages, tools=tools)["choices"][0]["message"]
    [call] = message["tool_calls"]
    call["function"]["arguments"] = respelled(call["function"]["arguments"])
    result = {"role": "tool", "tool_call_id": call["id"], "content": "5"}
    post(server, CHAT, second, messages=[*messages, message, result], tools=tools)


# ---- the memory of calls ----


def a_call(key: str, text: str = "") -> SampledCall:
    return SampledCall(key, "f", "{}", text)


def test_the_oldest_calls_are_forgotten() -> None:
    calls = SampledCalls(max_calls=2)
    for key in ("a", "b"):
        calls.remember("", a_call(key))
    assert calls.recall("", "call_a") == a_call("a")
    calls.remember("", a_call("c"))
    assert [calls.recall("", key) is not None for key in ("a", "b", "toolu_c")] == [True, False, True]


def test_long_calls_are_bounded_by_their_length() -> None:
    calls = SampledCalls(max_characters=100)
    calls.remember("", a_call("a", "x" * 60))
    calls.remember("", a_call("b", "x" * 60))
    assert calls.recall("", "a") is None
    assert calls.recall("", "b") is not None
    calls.remember("", a_call("c", "x" * 200))
    assert all(calls.recall("", key) is None for key in "abc")
    calls.remember("", a_call("d"))
    assert calls.recall("", "d") is not None


def test_salts_do_not_mix() -> None:
    calls = SampledCalls()
    calls.remember("one", a_call("a"))
    assert calls.recall("two", "a") is None
    assert calls.recall("one", "a") is not None


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ('{"a": 1, "b": [1.0]}', '{"b": [1], "a": 1.0}', True),
        ('{"a": 1}', '{"a": true}', False),
        ('{"a": 0}', '{"a": false}', False),
        ('{"a": null}', "{}", False),
        ('["a", "b"]', '["b", "a"]', False),
        ('{"a": "1"}', '{"a": 1}', False),
        ("[]", "{}", False),
    ],
)
def test_equal_values(left: str, right: str, same: bool) -> None:
    assert same_json(json.loads(left), json.loads(right)) == same
