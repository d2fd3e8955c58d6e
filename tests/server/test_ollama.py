"""Ollama's protocol on the wire: lines of JSON, options, tools, formats, errors. Its client: test_ollama_client.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import httpx
import pytest
from fake_server import MARKERS, TOKENIZER, WAIT, FakeServer, asked, make_tokenizer, said
from scripted_runner import ScriptedRunner
from templates import HERMES, hermes_call
from test_engine import GatedRunner

from slipstream.config import EngineConfig
from slipstream.grammar import JsonObject, JsonSchema
from slipstream.sampling import SamplingParams
from slipstream.server.protocols.ollama.chat import OllamaChatRequest, ollama_chat_generation_request
from slipstream.server.service.settings import ServerConfig
from slipstream.server.text.response_format import ResponseFormat

MODEL = "fake"
ASK = [{"role": "user", "content": "hi"}]
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


def lines(server: FakeServer, path: str, **body: Any) -> list[dict[str, Any]]:
    """A stream's objects; every line must be one."""
    with httpx.stream("POST", server.url + path, json={"model": MODEL, **body}, timeout=WAIT) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("application/x-ndjson")
        return [json.loads(line) for line in response.iter_lines()]


def answer(server: FakeServer, path: str, **body: Any) -> dict[str, Any]:
    response = server.post(path, model=MODEL, stream=False, **body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def error(server: FakeServer, path: str, **body: Any) -> str:
    response = server.post(path, model=MODEL, **body)
    assert response.status_code == 400, response.text
    assert list(response.json()) == ["error"]
    return str(response.json()["error"])


def test_chat_streams_by_default(fake: FakeServer) -> None:
    parts = lines(fake, "/api/chat", messages=ASK, options={"seed": 3, "num_predict": 20})
    *deltas, last = parts
    assert {part["message"]["role"] for part in parts} == {"assistant"}
    assert "".join(part["message"]["content"] for part in parts) == said(asked("hi"), 3, 20)
    assert not any(part["done"] for part in deltas)
    assert last["done"] is True
    assert last["message"]["content"] == ""
    assert all(set(part) == {"model", "created_at", "message", "done"} for part in deltas)
    assert {part["model"] for part in parts} == {MODEL}
    assert all(datetime.fromisoformat(part["created_at"]).tzinfo is not None for part in parts)


@pytest.mark.parametrize("stream", [None, True])
def test_only_false_turns_streaming_off(fake: FakeServer, stream: bool | None) -> None:
    assert len(lines(fake, "/api/chat", messages=ASK, stream=stream, options={"num_predict": 3, "seed": 3})) > 1


def test_the_last_object_counts_tokens_and_nanoseconds(fake: FakeServer) -> None:
    for last in (
        lines(fake, "/api/generate", prompt="hi", options={"num_predict": 1})[-1],
        answer(fake, "/api/chat", messages=ASK, options={"num_predict": 1}),
    ):
        assert last["done_reason"] == "length"
        assert (last["prompt_eval_count"], last["eval_count"]) == (len(TOKENIZER.encode(asked("hi"))), 1)
        assert all(isinstance(last[name], int) and last[name] > 0 for name in DURATIONS)  # clients divide by them
        assert last["total_duration"] == sum(last[name] for name in DURATIONS[1:])


def test_generate(fake: FakeServer) -> None:
    options = {"seed": 5, "num_predict": 12}
    parts = lines(fake, "/api/generate", prompt="hi", options=options)
    assert "".join(part["response"] for part in parts) == said(asked("hi"), 5, 12)
    assert answer(fake, "/api/generate", prompt="hi", options=options)["response"] == said(asked("hi"), 5, 12)
    raw = answer(fake, "/api/generate", prompt="hi", raw=True, options=options)
    assert raw["response"] == said("hi", 5, 12)
    with_system = answer(fake, "/api/generate", prompt="hi", system="be", options=options)
    assert with_system["response"] == said("s:be\nu:hi\n", 5, 12)


def test_stop_strings_and_limits(fake: FakeServer) -> None:
    text = said(asked("hi"), 3, 400)
    stop = text[4:6]
    for given in ([stop], stop):
        found = answer(fake, "/api/chat", messages=ASK, options={"seed": 3, "stop": given})
        assert found["message"]["content"] == text[: text.index(stop)]
        assert found["done_reason"] == "stop"
    for unlimited in (-1, -2, 0):
        found = answer(fake, "/api/chat", messages=ASK, options={"seed": 3, "num_predict": unlimited})
        assert found["message"]["content"] == text


def test_options_become_sampling_parameters() -> None:
    options = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.05,
        "seed": 4,
        "num_predict": 9,
        "num_ctx": 4096,
    }
    penalties = {"repeat_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    assert params(options={**options, **penalties}, top_k=5) == SamplingParams(
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        min_p=0.05,
        seed=4,
        max_tokens=9,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=0.25,
    )
    assert params(options={"top_k": -1, "seed": -1}) == SamplingParams(max_tokens=None)
    assert params() == SamplingParams(max_tokens=None)


def params(**fields: Any) -> SamplingParams:
    request = OllamaChatRequest.model_validate({"messages": ASK, **fields})
    return ollama_chat_generation_request(request, EngineConfig()).params


@pytest.mark.parametrize(("option", "wrong"), [("temperature", -1), ("top_p", 2), ("repeat_penalty", 0), ("seed", "a")])
def test_options_out_of_range_are_named(fake: FakeServer, option: str, wrong: Any) -> None:
    assert f"options.{option}" in error(fake, "/api/chat", messages=ASK, options={option: wrong})


@pytest.mark.parametrize(
    ("option", "neutral", "other"), [("mirostat", 0, 2), ("typical_p", 1.0, 0.7), ("tfs_z", 1, 0.5)]
)
def test_samplers_of_others_pass_with_their_neutral_value_only(
    fake: FakeServer, option: str, neutral: float, other: float
) -> None:
    assert answer(fake, "/api/chat", messages=ASK, options={option: neutral, "num_predict": 1})["done"]
    assert f"options.{option}" in error(fake, "/api/chat", messages=ASK, options={option: other})


def test_options_about_loading_have_no_effect_and_no_warning(fake: FakeServer) -> None:
    loading = {"num_gpu": 99, "num_thread": 8, "num_batch": 512, "use_mmap": True, "numa": False, "num_keep": 5}
    found = answer(fake, "/api/chat", messages=ASK, options={**loading, "num_predict": 1}, keep_alive="5m")
    assert "warnings" not in found
    odd = answer(fake, "/api/chat", messages=ASK, options={"num_predict": 1, "colour": 3})
    assert "options.colour" in odd["warnings"][0]


def test_an_empty_prompt_loads_the_model(fake: FakeServer) -> None:
    before = fake.finished("length") + fake.finished("stop")
    for path, body, empty in (
        ("/api/generate", {}, {"response": ""}),
        ("/api/generate", {"prompt": "", "keep_alive": 0}, {"response": ""}),
        ("/api/chat", {"messages": []}, {"message": {"role": "assistant", "content": ""}}),
        ("/api/chat", {}, {"message": {"role": "assistant", "content": ""}}),
    ):
        response = fake.post(path, model=MODEL, **body)
        assert response.headers["content-type"] == "application/json"
        found = response.json()
        assert found.pop("created_at")
        assert found == {"model": MODEL, **empty, "done": True, "done_reason": "load"}
    assert fake.finished("length") + fake.finished("stop") == before


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "template": "{{ .Prompt }}"}, "template"),
        ({"prompt": "a", "context": [1, 2]}, "context"),
        ({"prompt": "a", "images": ["aGk="]}, "images"),
        ({"prompt": "a", "raw": True, "system": "b"}, "system"),
        ({"prompt": "a", "format": "yaml"}, "format"),
        ({"prompt": "a", "think": "loudly"}, "think"),
        ({"prompt": 3}, "prompt"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fake: FakeServer, body: dict[str, Any], word: str) -> None:
    assert word in error(fake, "/api/generate", **body)


def test_images_in_messages_are_refused_by_that_word(fake: FakeServer) -> None:
    message = {"role": "user", "content": "what is it?", "images": ["aGk="]}
    assert error(fake, "/api/chat", messages=[message]) == "messages.0.images: images cannot be read here, only text"
    assert answer(fake, "/api/chat", messages=[{**message, "images": []}], options={"num_predict": 1})["done"]


def test_a_message_may_have_no_content(fake: FakeServer) -> None:
    assert answer(fake, "/api/chat", messages=[{"role": "user"}], options={"num_predict": 1})["done"]


def test_the_tag_of_a_name_may_be_left_out_or_given() -> None:
    with FakeServer(config=ServerConfig(port=0, names=("mine",))) as server:
        for name, status in (("mine", 200), ("mine:latest", 200), ("fake:latest", 200), ("other:latest", 404)):
            assert server.post("/api/generate", model=name).status_code == status


def test_neutral_values_pass(fake: FakeServer) -> None:
    neutral = {"suffix": "", "template": "", "context": [], "images": [], "system": "", "format": "", "think": None}
    assert answer(fake, "/api/generate", prompt="hi", options={"num_predict": 1}, **neutral)["done"]


def test_log_probabilities(fake: FakeServer) -> None:
    asked_for = {"messages": ASK, "logprobs": True, "top_logprobs": 2, "options": {"num_predict": 3, "seed": 5}}
    whole = answer(fake, "/api/chat", **asked_for)
    assert [len(each["top_logprobs"]) for each in whole["logprobs"]] == [2, 2, 2]
    assert "".join(each["token"] for each in whole["logprobs"]) == whole["message"]["content"]
    streamed = lines(fake, "/api/chat", **asked_for)
    assert sum(len(part.get("logprobs", [])) for part in streamed) == 3


# Thinking, tools and formats: a model with a script.

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Look it up", "parameters": SCHEMA}},
    {"function": {"name": "time"}},
]


def script(prompt: str) -> str:
    thinking = "" if prompt.endswith("</think>\n\n") else "<think>\nhm\n</think>\n\n"
    if "t:sun" in prompt:
        return f"{thinking}Sun."
    if "tools:" in prompt:
        return f"{thinking}Let me see.\n\n{hermes_call('weather', city='Oslo')}\n{hermes_call('time')}"
    return f"{thinking}No tools."


@pytest.fixture(scope="module")
def agent() -> Iterator[FakeServer]:
    tokenizer = make_tokenizer(HERMES, MARKERS)
    with FakeServer(ScriptedRunner(tokenizer, script), tokenizer=tokenizer) as server:
        yield server


def test_calls_have_their_arguments_as_an_object(agent: FakeServer) -> None:
    whole = answer(agent, "/api/chat", messages=ASK, tools=TOOLS)["message"]
    calls = [call["function"] for call in whole["tool_calls"]]
    assert calls == [
        {"index": 0, "name": "weather", "arguments": {"city": "Oslo"}},
        {"index": 1, "name": "time", "arguments": {}},
    ]
    assert (whole["content"].strip(), whole["thinking"]) == ("Let me see.", "hm")

    parts = lines(agent, "/api/chat", messages=ASK, tools=TOOLS)
    streamed = [call for part in parts for call in part["message"].get("tool_calls", [])]
    assert [call["function"] for call in streamed] == calls
    assert len({call["id"] for call in streamed}) == 2
    assert "".join(part["message"].get("thinking", "") for part in parts) == "hm"
    assert parts[-1]["done_reason"] == "stop"  # as Ollama has it


def test_a_call_is_sent_back_with_its_result(agent: FakeServer) -> None:
    call = {"id": "call_1", "function": {"index": 0, "name": "weather", "arguments": {"city": "Oslo"}}}
    history = [
        *ASK,
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "sun", "tool_name": "weather"},
    ]
    found = answer(agent, "/api/chat", messages=history, tools=TOOLS)
    assert found["message"]["content"] == "Sun."
    assert "warnings" not in found
    assert isinstance(agent.runner, ScriptedRunner)
    assert '{"name": "weather", "arguments": {"city": "Oslo"}}' in agent.runner.prompts[-1]
    assert "<think>\nhm\n</think>" in agent.runner.prompts[-1]


def test_thinking_is_switched(agent: FakeServer) -> None:
    for think, thought in ((False, None), (True, "hm"), ("low", "hm")):
        found = answer(agent, "/api/chat", messages=ASK, think=think)
        assert found["message"].get("thinking") == thought
        assert found["message"]["content"] == "No tools."
        assert answer(agent, "/api/generate", prompt="hi", think=think).get("thinking") == thought


def test_the_last_message_of_the_assistant_is_continued(agent: FakeServer) -> None:
    answer(agent, "/api/chat", messages=[*ASK, {"role": "assistant", "content": "So"}], think=False)
    assert isinstance(agent.runner, ScriptedRunner)
    assert agent.runner.prompts[-1].endswith("So")


@pytest.mark.parametrize(
    ("given", "spec"),
    [("json", JsonObject()), (SCHEMA, JsonSchema(SCHEMA, lenient=True)), ("", None), (None, None)],
)
def test_formats_become_response_formats(given: Any, spec: Any) -> None:
    request = OllamaChatRequest.model_validate({"messages": ASK, "format": given})
    found = ollama_chat_generation_request(request, EngineConfig()).response_format
    assert found == (None if spec is None else ResponseFormat(spec, "format"))


def test_a_format_that_cannot_be_compiled_is_named(fake: FakeServer) -> None:
    assert "format" in error(fake, "/api/chat", messages=ASK, format={"type": "nonsense"})


# The model.


def test_the_model_is_listed_shown_and_running(fake: FakeServer) -> None:
    [listed] = fake.get("/api/tags").json()["models"]
    assert listed["name"] == listed["model"] == MODEL
    assert len(listed["digest"]) == 64
    assert datetime.fromisoformat(listed["modified_at"]).tzinfo is not None
    [running] = fake.get("/api/ps").json()["models"]
    assert running["context_length"] > 0
    assert datetime.fromisoformat(running["expires_at"]).year > 2100
    shown = fake.post("/api/show", model=MODEL).json()
    assert shown["model_info"]["hash.context_length"] == running["context_length"]
    assert "completion" in shown["capabilities"]
    assert "thinking" not in shown["capabilities"]
    assert shown["details"]["family"] == "hash"
    assert shown["template"] == TOKENIZER.template_text


def test_capabilities(agent: FakeServer) -> None:
    assert agent.post("/api/show", name=MODEL).json()["capabilities"] == ["completion", "tools", "thinking"]


def test_the_version_is_one_that_clients_accept(fake: FakeServer) -> None:
    assert tuple(map(int, fake.get("/api/version").json()["version"].split("."))) >= (0, 6, 4)
    assert httpx.head(f"{fake.url}/api/version").status_code == 200


@pytest.mark.parametrize("action", ["embed", "embeddings", "pull", "push", "create", "copy", "delete"])
def test_the_rest_is_refused_in_a_sentence(fake: FakeServer, action: str) -> None:
    response = httpx.request(
        "DELETE" if action == "delete" else "POST", f"{fake.url}/api/{action}", json={"model": "x"}
    )
    assert response.status_code == 404
    assert response.json()["error"].startswith("this server")


def test_errors_have_one_shape_on_every_path(fake: FakeServer) -> None:
    for response in (fake.get("/api/nothing"), fake.get("/api/chat"), fake.post("/api/show", model=3)):
        assert response.status_code in (400, 404, 405)
        assert isinstance(response.json()["error"], str)


def test_a_missing_key_has_the_same_shape() -> None:
    with FakeServer(config=ServerConfig(port=0, api_keys=("secret",))) as server:
        assert "API key" in server.get("/api/tags").json()["error"]
        assert server.get("/api/tags", authorization="Bearer secret").json()["models"]


def test_silence_is_an_empty_part() -> None:
    """Clients parse every line, so a keep-alive is a part without text."""
    runner = GatedRunner(num_blocks=256)
    with FakeServer(runner, ServerConfig(port=0, keep_alive_seconds=0.05)) as server:
        body = {"model": MODEL, "messages": ASK, "options": {"num_predict": 1}}
        with httpx.stream("POST", f"{server.url}/api/chat", json=body, timeout=WAIT) as response:
            found = response.iter_lines()
            first = json.loads(next(found))
            assert (first["message"]["content"], first["done"]) == ("", False)
            runner.fuel.put(None)
            assert json.loads(list(found)[-1])["done"]


def test_an_error_in_a_stream_is_its_last_line() -> None:
    runner = GatedRunner(num_blocks=256)
    with FakeServer(runner, ServerConfig(port=0, keep_alive_seconds=0.05)) as server:
        body = {"model": MODEL, "messages": ASK}
        with httpx.stream("POST", f"{server.url}/api/chat", json=body, timeout=WAIT) as response:
            found = response.iter_lines()
            next(found)
            runner.fuel.put(RuntimeError("broken"))
            assert list(json.loads(list(found)[-1])) == ["error"]
