"""What a refusal says about a field: where it is and what it may be, in words that are the same on every path."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from fake_server import FakeServer
from pydantic import BaseModel

from slipstream.server.errors import ApiError
from slipstream.server.protocols.body import JsonLimits, parse
from slipstream.server.protocols.expected import KINDS
from slipstream.server.protocols.registry import (
    CHAT,
    COMPLETIONS,
    LLAMA_COMPLETION,
    MESSAGES,
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    RESPONSES,
)
from slipstream.server.protocols.tokenization import DetokenizeRequest, TokenizeRequest

HELLO = [{"role": "user", "content": "hello"}]
BODIES: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "chat": (CHAT.request_model, {"messages": HELLO}),
    "completions": (COMPLETIONS.request_model, {"prompt": "a"}),
    "responses": (RESPONSES.request_model, {"input": "a"}),
    "messages": (MESSAGES.request_model, {"messages": HELLO, "max_tokens": 1}),
    "llama.cpp": (LLAMA_COMPLETION.request_model, {"prompt": "a"}),
    "ollama chat": (OLLAMA_CHAT.request_model, {"messages": HELLO}),
    "ollama generate": (OLLAMA_GENERATE.request_model, {"prompt": "a"}),
    "tokenize": (TokenizeRequest, {}),
    "detokenize": (DetokenizeRequest, {"tokens": [1]}),
}


def refusal(kind: str, **more: Any) -> ApiError:
    request, body = BODIES[kind]
    with pytest.raises(ApiError) as refused:
        parse(request, json.dumps(body | more).encode(), JsonLimits())
    return refused.value


LIMIT = "should be a whole number of at least 1, or -1"
TEXT_OR_LIST = "should be a text, or a list that is not empty"
STOPS = "should be a text of 1 to 512 characters, or a list of at most 16 entries"


@pytest.mark.parametrize("value", [0, -5, 1.5, "x", True, [5]])
def test_a_limit_of_tokens_is_positive_or_minus_one(value: Any) -> None:
    fields = [("chat", name) for name in ("max_tokens", "max_completion_tokens", "n_predict")]
    for kind, name in [*fields, ("completions", "max_tokens"), ("responses", "max_output_tokens")]:
        error = refusal(kind, **{name: value})
        assert (error.message, error.param) == (f"{name} {LIMIT}", name)
    assert refusal("messages", max_tokens=value).message == "max_tokens should be a whole number of at least 1"


def test_no_tokens_with_an_echo_are_refused_in_the_same_words() -> None:
    assert refusal("completions", max_tokens=0, echo=True, logprobs=1).message == f"max_tokens {LIMIT}"


SENTENCES: list[tuple[str, dict[str, Any], str]] = [
    # A field that may be several things: all of them are named.
    ("chat", {"stop": 5}, f"stop {STOPS}"),
    ("chat", {"stop": ""}, f"stop {STOPS}"),
    ("ollama chat", {"options": {"stop": 5}}, f"options.stop {STOPS}"),
    ("completions", {"prompt": []}, f"prompt {TEXT_OR_LIST}"),
    ("completions", {"prompt": 5}, f"prompt {TEXT_OR_LIST}"),
    ("llama.cpp", {"prompt": []}, f"prompt {TEXT_OR_LIST}"),
    ("responses", {"input": []}, f"input {TEXT_OR_LIST}"),
    ("ollama chat", {"format": "yaml"}, "format should be '', 'json', or an object"),
    ("ollama generate", {"format": 5}, "format should be '', 'json', or an object"),
    ("chat", {"tool_choice": "x"}, "tool_choice should be 'none', 'auto', 'required', or an object"),
    ("chat", {"guided_json": 5}, "guided_json should be an object, or a text"),
    # The branch that came furthest is the one that was meant.
    ("chat", {"stop": ["a", ""]}, "stop.1 should be a text of 1 to 512 characters"),
    ("chat", {"stop": ["a"] * 17}, "stop should have at most 16 entries"),
    ("completions", {"prompt": [1, "a"]}, "prompt.1 should be a whole number of at least 0"),
    ("completions", {"prompt": ["a", 1]}, "prompt.1 should be a text"),
    ("completions", {"prompt": ["a"] * 129}, "prompt should have at most 128 entries"),
    ("completions", {"prompt": [[1]] * 129}, "prompt should have at most 128 entries"),
    ("responses", {"input": [{"type": "reasoning", "content": 5}]}, "input.0.content should be a list"),
    # Names are those of the body: pydantic's path has the branches of unions, too.
    ("chat", {"response_format": {"type": "json_schema"}}, "response_format.json_schema is required"),
    ("chat", {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
     "response_format.json_schema.schema should be an object"),
    ("messages", {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema is required"),
    ("messages", {"thinking": {"type": "enabled", "budget_tokens": 0}},
     "thinking.budget_tokens should be a whole number of at least 1"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text is required"),
    ("chat", {"chat_template_kwargs": {"str": []}},
     "chat_template_kwargs.str should be true or false, a whole number, a number, or a text"),
    # One kind of value.
    ("chat", {"messages": []}, "messages should be a list that is not empty"),
    ("messages", {"messages": 5}, "messages should be a list that is not empty"),
    ("tokenize", {"messages": []}, "messages should be a list that is not empty"),
    ("detokenize", {"tokens": [-1]}, "tokens.0 should be a whole number of at least 0"),
    ("chat", {"n": 17}, "n should be a whole number from 1 to 16"),
    ("chat", {"temperature": "x"}, "temperature should be a number from 0 to 100"),
    ("chat", {"top_p": 0}, "top_p should be a number above 0 and at most 1"),
    ("chat", {"stream": "x"}, "stream should be true or false"),
    ("chat", {"reasoning": {"effort": 5}}, "reasoning.effort may only be 'none', 'minimal', 'low', 'medium', 'high', "
     "'xhigh' or 'max' here, other values are not supported"),
    ("chat", {"logit_bias": {"x": 1}}, "logit_bias.x should match the pattern ^[0-9]{1,9}$"),
    ("llama.cpp", {"logit_bias": {"5": "x"}}, "logit_bias.5 should be a number from -100 to 100"),
    ("llama.cpp", {"logit_bias": [[5, 200]]}, "logit_bias.5 should be a number from -100 to 100"),
    ("llama.cpp", {"logit_bias": "5"},
     "logit_bias: neither an object nor a list of pairs of a token id and a number"),
    # A large bound only where it was exceeded.
    ("chat", {"seed": "x"}, "seed should be a whole number"),
    ("chat", {"seed": 1 << 63}, f"seed should be a whole number of at most {(1 << 63) - 1}"),
    ("chat", {"max_tokens": 1 << 40}, f"max_tokens should be a whole number from 1 to {1 << 31}, or -1"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "more", "sentence"), SENTENCES)
def test_a_refusal_says_what_the_field_may_be(kind: str, more: dict[str, Any], sentence: str) -> None:
    error = refusal(kind, **more)
    assert error.message == sentence
    assert error.param == re.split("[ :]", sentence)[0]


def test_a_body_that_is_no_object() -> None:
    for body in (b"5", b"[]", b'"x"', b"null"):
        with pytest.raises(ApiError, match=r"^the body should be an object$"):
            parse(CHAT.request_model, body, JsonLimits())


WRONG: list[Any] = [5, -1000, 1.5, "x", True, [], [5], [[]], {}, {"a": 5}, {"type": "x"}, "x" * 600, 10**30]
VALIDATOR = (": input should", "valid", "validation", "constrained", "list[", "literal[", "dict[", "None", *KINDS)


def refused(kind: str, name: str, value: Any) -> list[ApiError]:
    request, body = BODIES[kind]
    try:
        parse(request, json.dumps(body | {name: value}).encode(), JsonLimits())
    except ApiError as error:
        return [error]
    return []


@pytest.mark.parametrize("kind", BODIES)
def test_no_refusal_shows_the_validator(kind: str) -> None:
    """Every field of every request, with values of every kind."""
    fields = BODIES[kind][0].model_fields.items()
    names = [field.alias or name for name, field in fields]
    found = [(name, error) for name in names for value in WRONG for error in refused(kind, name, value)]
    assert {name for name, _ in found} >= set(names) - {"metadata", "context"}  # which may be almost anything
    for name, error in found:
        assert (error.param or "").startswith(name)
        assert error.message.startswith(name)
        assert not [word for word in VALIDATOR if word in error.message]


def test_refusals_in_every_shape(fake: FakeServer) -> None:
    sentence = f"max_tokens {LIMIT}"
    error = fake.post("/v1/chat/completions", messages=HELLO, max_tokens=0).json()["error"]
    assert (error["message"], error["param"]) == (sentence, "max_tokens")
    message = fake.post("/v1/messages", messages=[], max_tokens=1).json()["error"]["message"]
    assert message == "messages should be a list that is not empty"
    found = fake.post("/api/chat", messages=HELLO, format="yaml").json()
    assert found == {"error": "format should be '', 'json', or an object"}


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ({"guided_regex": "("}, "guided_regex: regex parse error: unclosed group"),
        ({"guided_regex": r"\bfoo"}, r"guided_regex: lookarounds not supported yet; WordUnicode in regex /\bfoo/"),
        ({"guided_grammar": "start: foo"}, 'guided_grammar: at 1(8): unknown name: "foo"'),
        ({"json_schema": {"pattern": "(", "type": "string"}}, "json_schema: regex parse error: unclosed group"),
    ],
)
def test_a_grammar_is_refused_in_one_line(fake: FakeServer, field: dict[str, Any], reason: str) -> None:
    assert fake.post("/v1/chat/completions", messages=HELLO, **field).json()["error"]["message"] == reason
