"""Fields and spellings of other servers' clients: those with a meaning here work, the rest is in warnings."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fake_server import TEMPLATE, TOKENIZER, FakeServer, asked, events, make_tokenizer, said
from fakes import continuation
from templates import QWEN_XML

from slipstream.config import EngineConfig
from slipstream.grammar import Gbnf, JsonSchema
from slipstream.server.protocols.openai.chat import ChatRequest, chat_generation_request
from slipstream.server.protocols.openai.responses import ResponsesRequest
from slipstream.server.service.settings import ServerConfig

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
HELLO = [{"role": "user", "content": "hello"}]
PATHS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 8, "seed": 5},
    COMPLETIONS: {"prompt": asked("hello"), "max_tokens": 8, "seed": 5},
    RESPONSES: {"input": "hello", "max_output_tokens": 8, "seed": 5},
    MESSAGES: {"messages": HELLO, "max_tokens": 8, "seed": 5},
}


def stream(server: FakeServer, path: str, **body: Any) -> list[dict[str, Any]]:
    with httpx.stream("POST", server.url + path, json={**body, "stream": True}, timeout=300) as response:
        assert response.status_code == 200
        return events(response.iter_lines())


def last_report(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The fields beside `timings`, wherever the protocol has its last event."""
    [event] = [each for each in found if "timings" in each or "timings" in each.get("response", {})]
    return dict(event.get("response", event))


@pytest.mark.parametrize("path", PATHS)
def test_unknown_fields_are_ignored_and_named(fake: FakeServer, path: str) -> None:
    plain = fake.post(path, **PATHS[path]).json()
    response = fake.post(path, **PATHS[path], frobnicate=3, speculative={"tree": True}).json()
    assert response["warnings"] == [
        "frobnicate is not a field this server knows: it was ignored",
        "speculative.tree is not a field this server knows: it was ignored",
    ]
    assert "warnings" not in plain
    assert response["timings"]["predicted_n"] == plain["timings"]["predicted_n"]
    streamed = last_report(stream(fake, path, **PATHS[path], frobnicate=3))
    assert [warning.split()[0] for warning in streamed["warnings"]] == ["frobnicate"]


def test_unknown_fields_are_counted_without_their_names(fake: FakeServer) -> None:
    fake.post(CHAT, **PATHS[CHAT], secret_name=1)
    metrics = fake.get("/metrics").text
    assert (
        float(next(x for x in metrics.splitlines() if x.startswith("slipstream_unknown_fields_total")).split()[1]) > 0
    )
    assert "secret_name" not in metrics


def test_strict_refuses_them() -> None:
    with FakeServer(config=ServerConfig(port=0, strict=True)) as server:
        error = server.post(CHAT, **PATHS[CHAT], frobnicate=3).json()["error"]
        assert (error["code"], error["param"]) == ("unknown_field", "frobnicate")
        assert server.post(CHAT, **PATHS[CHAT], user="u", mirostat=0).status_code == 200


SAME_TEXT: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"top_k": -1, "cache_prompt": True, "id_slot": -1, "samplers": ["top_k"], "mirostat": 0, "typical_p": 1.0}),
    (CHAT, {"usage": {"include": True}, "provider": {"order": []}, "transforms": [], "session_id": "s"}),
    (CHAT, {"reasoning": {"effort": "none"}, "verbosity": "low", "store": True, "prediction": {"type": "content"}}),
    (CHAT, {"thinking": {"type": "adaptive"}, "enable_thinking": False}),
    (CHAT, {"messages": [{"role": "user", "content": "hello", "cache_control": {"type": "ephemeral"}}]}),
    (CHAT, {"no_stop_trim": False, "skip_special_tokens": True, "separate_reasoning": True, "stream_reasoning": True,
            "return_hidden_states": False, "include_reasoning": True, "continue_final_message": False}),
    (CHAT, {"priority": 0, "use_beam_search": False, "length_penalty": 1.0, "keep_alive": "5m", "cache_salt": "x"}),
    (CHAT, {"repeat_penalty": 1.0, "temperature": 1, "lora": [], "n_probs": 0, "add_generation_prompt": True}),
    (COMPLETIONS, {"suffix": None, "best_of": 1, "repeat_last_n": 64, "dry_multiplier": 0.0}),
    (RESPONSES, {"store": True, "include": ["reasoning.encrypted_content"], "text": {"verbosity": "low"},
                 "client_metadata": {}, "prompt_cache_key": "k", "truncation": "auto",
                 "reasoning": {"summary": "auto"}}),
    (MESSAGES, {"context_management": {"edits": []}, "diagnostics": {}, "output_config": {"effort": "xhigh"},
                "betas": ["x"], "metadata": {"user_id": "u"}, "temperature": 1.0}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "more"), SAME_TEXT)
def test_what_asks_for_nothing_changes_nothing(fake: FakeServer, path: str, more: dict[str, Any]) -> None:
    plain, response = fake.post(path, **PATHS[path]).json(), fake.post(path, **(PATHS[path] | more))
    assert response.status_code == 200, response.text
    answer = response.json()
    assert "warnings" not in answer
    key = {CHAT: "choices", COMPLETIONS: "choices", RESPONSES: "output", MESSAGES: "content"}[path]
    assert _text(answer[key]) == _text(plain[key])


def _text(found: Any) -> str:
    return str([each.get("message") or each.get("text") or each["content"][0]["text"] for each in found])


def test_unlimited_is_minus_one(fake: FakeServer) -> None:
    for field in ("max_tokens", "max_completion_tokens", "n_predict"):
        answer = fake.post(CHAT, messages=HELLO, seed=5, **{field: -1}).json()
        assert answer["usage"]["total_tokens"] == 128  # the context
    assert fake.post(COMPLETIONS, prompt="x", seed=5, n_predict=3).json()["usage"]["completion_tokens"] == 3


def test_llama_cpp_s_grammar_and_schema() -> None:
    schema = {"enum": [7]}
    for more, spec in (
        ({"grammar": 'root ::= "yes"'}, Gbnf('root ::= "yes"')),
        ({"grammar": ""}, None),
        ({"json_schema": schema}, JsonSchema(schema)),
        ({"response_format": {"type": "json_object", "schema": schema}}, JsonSchema(schema)),
    ):
        request = ChatRequest.model_validate({"messages": HELLO, **more})
        format = chat_generation_request(request, EngineConfig()).response_format
        assert (None if format is None else format.spec) == spec


@pytest.mark.parametrize("streaming", [False, True])
def test_several_prompts_in_one_completion(fake: FakeServer, streaming: bool) -> None:
    texts = ["one", "two!"]
    for given in (texts, [list(TOKENIZER.encode(text)) for text in texts]):
        body = {"prompt": given, "max_tokens": 6, "seed": 5, "n": 2, "stream_options": {"include_usage": True}}
        if streaming:
            found = stream(fake, COMPLETIONS, **body)
            choices = [choice for each in found for choice in each["choices"]]
            answer = ["".join(c["text"] for c in choices if c["index"] == index) for index in range(4)]
            usage = found[-1]["usage"]
        else:
            whole = fake.post(COMPLETIONS, **body).json()
            assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
            answer, usage = [choice["text"] for choice in whole["choices"]], whole["usage"]
        assert answer == [said(text, seed, 6) for text in texts for seed in (5, 6)]
        assert usage["prompt_tokens"] == sum(map(len, texts))


def test_token_ids(fake: FakeServer) -> None:
    prompt = list(TOKENIZER.encode(asked("hello")))
    tokens = list(continuation(prompt, 5, 97, 8, (96,)))
    whole = fake.post(CHAT, **PATHS[CHAT], return_token_ids=True).json()
    assert (whole["prompt_token_ids"], whole["choices"][0]["token_ids"]) == (prompt, tokens)
    found = stream(fake, CHAT, **PATHS[CHAT], return_token_ids=True)
    assert found[0]["prompt_token_ids"] == prompt
    texts = [each["choices"][0] for each in found if each["choices"] and each["choices"][0]["delta"].get("content")]
    assert [token for choice in texts for token in choice["token_ids"]] == tokens
    [choice] = fake.post(COMPLETIONS, **PATHS[COMPLETIONS], return_token_ids=True).json()["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (prompt, tokens)
    found = stream(fake, COMPLETIONS, **PATHS[COMPLETIONS], return_token_ids=True)
    assert found[0]["choices"][0]["prompt_token_ids"] == prompt
    assert [token for each in found for token in each["choices"][0].get("token_ids", [])] == tokens


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_usage_and_timings_in_every_event(fake: FakeServer, path: str) -> None:
    options = {"continuous_usage_stats": True, "include_usage": True}
    found = stream(fake, path, **PATHS[path], stream_options=options, timings_per_token=True)
    so_far = [each for each in found if each["choices"] and "usage" in each]
    counts = [each["usage"]["completion_tokens"] for each in so_far]
    assert counts == sorted(counts)
    assert counts[-1] == found[-1]["usage"]["completion_tokens"] == 8
    assert all(each["timings"]["predicted_n"] == count for each, count in zip(so_far, counts))


def test_tools_that_a_server_would_run_are_left_out(fake: FakeServer) -> None:
    tools = [{"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}}]
    warnings = fake.post(RESPONSES, **PATHS[RESPONSES], tools=tools).json()["warnings"]
    assert "tools.0 (custom apply_patch) is left out: only function tools are supported" in warnings
    [warning] = fake.post(CHAT, **PATHS[CHAT], tools=[{"type": "web_search"}]).json()["warnings"]
    assert warning.startswith("tools.0 (web_search)")
    server_tools = [{"type": "web_search_20250305", "name": "web_search"}]
    [warning] = fake.post(MESSAGES, **PATHS[MESSAGES], tools=server_tools).json()["warnings"]
    assert warning.startswith("tools.0 (web_search_20250305 web_search)")


def test_items_of_other_servers_tools(fake: FakeServer) -> None:
    """A custom tool's result reaches the model; what cannot be written into a prompt is left out."""
    items = [
        {"role": "user", "content": "hello"},
        {"type": "web_search_call", "id": "x", "status": "completed"},
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "text"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
    ]
    answer = fake.post(RESPONSES, input=items, max_output_tokens=8, seed=5).json()
    assert answer["warnings"] == ["input.1 (web_search_call) is left out: it is not supported"]
    call, result = ResponsesRequest.model_validate({"input": items}).messages()[1:]
    assert call["tool_calls"][0]["function"] == {"name": "patch", "arguments": {"input": "text"}}
    assert result == {"role": "tool", "content": "done", "tool_call_id": "c"}
    refused = fake.post(RESPONSES, input=[{"type": "item_reference", "id": "x"}])
    assert "item_reference" in refused.json()["error"]["message"]


IMAGES = [
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]}),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]}),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
    (MESSAGES, {"messages": [{"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image", "source": {}}]}]}]}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "more"), IMAGES)
def test_images_are_refused_by_that_word(fake: FakeServer, path: str, more: dict[str, Any]) -> None:
    response = fake.post(path, **(PATHS[path] | more))
    assert response.status_code == 400
    assert "images cannot be read here, only text" in response.json()["error"]["message"]


PREFILL = [*HELLO, {"role": "assistant", "content": "Well, "}]


def test_an_assistant_s_last_message_is_continued(fake: FakeServer) -> None:
    """The fake template has no generation prompt: the continued text follows the messages before it."""
    expected = said(asked("hello") + "Well, ", 5, 8)
    chat = fake.post(CHAT, messages=PREFILL, max_tokens=8, seed=5).json()
    assert chat["choices"][0]["message"]["content"] == expected
    message = fake.post(MESSAGES, messages=PREFILL, max_tokens=8, seed=5).json()
    assert message["content"][0]["text"] == expected
    own = fake.post(CHAT, messages=PREFILL, max_tokens=8, seed=5, continue_final_message=False).json()
    assert own["choices"][0]["message"]["content"] == said(asked("hello") + "a:Well, \n", 5, 8)


def test_a_thinking_model_continues_its_answer_without_thinking_again() -> None:
    with FakeServer(tokenizer=make_tokenizer(QWEN_XML)) as server:
        for thought, begun in (("", "\n</think>\n\nWell, "), ("hm", "hm\n</think>\n\nWell, ")):
            last = {"role": "assistant", "content": "Well, ", "reasoning_content": thought}
            tokens = server.post("/tokenize", messages=HELLO).json()["tokens"]
            before = server.tokenizer.decode(tokens, skip_special=False)
            assert before.endswith("<think>\n")
            answer = server.post(CHAT, messages=[*HELLO, last], max_tokens=8, return_token_ids=True).json()
            assert server.tokenizer.decode(answer["prompt_token_ids"], skip_special=False) == before + begun
            assert "reasoning_content" not in answer["choices"][0]["message"]


ASKS_TO_THINK: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"thinking_budget": 64}),
    (CHAT, {"reasoning_effort": "low"}),
    (CHAT, {"enable_thinking": True}),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": True}}),
    (CHAT, {"thinking": {"type": "enabled", "budget_tokens": 64}}),
    (CHAT, {"reasoning": {"max_tokens": 64}}),
    (RESPONSES, {"reasoning": {"effort": "low"}}),
    (RESPONSES, {"thinking_budget": 64}),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 64}}),
    ("/api/chat", {"think": True}),
    ("/api/chat", {"think": "low"}),
    ("/api/generate", {"think": True}),
]
ASKS_FOR_NO_THINKING: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"thinking_budget": 64, "enable_thinking": False}),
    (CHAT, {"reasoning_effort": "none"}),
    (CHAT, {"thinking": {"type": "adaptive"}}),
    (RESPONSES, {"reasoning": {"effort": "none"}}),
    (MESSAGES, {"thinking": {"type": "adaptive"}}),
    (MESSAGES, {"thinking": {"type": "disabled"}}),
    ("/api/chat", {"think": False}),
]
OLLAMA = {
    "/api/chat": {"messages": HELLO, "stream": False, "options": {"num_predict": 8}},
    "/api/generate": {"prompt": "hello", "stream": False, "options": {"num_predict": 8}},
}


@pytest.mark.parametrize(("path", "more"), ASKS_TO_THINK)
def test_thinking_on_a_model_that_does_not_think(fake: FakeServer, path: str, more: dict[str, Any]) -> None:
    [warning] = fake.post(path, **(PATHS | OLLAMA)[path], **more).json()["warnings"]
    assert warning == "thinking has no effect: this model does not think"


@pytest.mark.parametrize(("path", "more"), ASKS_FOR_NO_THINKING)
def test_no_warning_where_the_model_may_leave_it(fake: FakeServer, path: str, more: dict[str, Any]) -> None:
    response = fake.post(path, **(PATHS | OLLAMA)[path], **more)
    assert response.status_code == 200
    assert "warnings" not in response.json()


def test_a_model_that_thinks_gives_no_warning() -> None:
    with FakeServer(tokenizer=make_tokenizer(QWEN_XML)) as server:
        assert "warnings" not in server.post(CHAT, **PATHS[CHAT], reasoning_effort="low").json()
        assert "warnings" not in server.post(RESPONSES, **PATHS[RESPONSES], reasoning={"effort": "low"}).json()


def test_tokens_are_counted_without_a_model_that_thinks(fake: FakeServer) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    assert fake.post("/v1/messages/count_tokens", messages=HELLO, thinking=thinking).status_code == 200


SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
)


def test_several_system_messages_where_a_template_takes_one() -> None:
    template = SYSTEM_FIRST + TEMPLATE.removeprefix("{% for m in messages %}")
    messages = [{"role": "system", "content": "a"}, *HELLO, {"role": "developer", "content": "b"}]
    with FakeServer(tokenizer=make_tokenizer(template)) as server:
        answer = server.post(CHAT, messages=messages, max_tokens=4, return_token_ids=True).json()
        assert server.tokenizer.decode(answer["prompt_token_ids"]) == "s:a\n\nb\nu:hello\n"
