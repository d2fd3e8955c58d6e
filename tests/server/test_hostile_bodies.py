"""Bodies made to be expensive: refused before they are built, at a cost near that of reading them."""

from __future__ import annotations

import tracemalloc

import pytest
from pydantic import BaseModel

from slipstream.server.errors import ApiError
from slipstream.server.protocols.anthropic.messages import MessagesRequest
from slipstream.server.protocols.body import MAX_LIST, MAX_STRINGS, MIN_VALUES, JsonLimits, check_limits, parse
from slipstream.server.protocols.openai.chat import ChatRequest
from slipstream.server.protocols.openai.completions import CompletionRequest
from slipstream.server.protocols.openai.responses import ResponsesRequest
from slipstream.server.protocols.tokenization import DetokenizeRequest

LIMITS = JsonLimits()
BYTES = 4 << 20


def repeated(head: str, unit: str, tail: str, num_bytes: int = BYTES) -> bytes:
    return (head + unit * ((num_bytes - len(head)) // len(unit)) + tail).encode()


def refusal(request: type[BaseModel], body: bytes) -> ApiError:
    with pytest.raises(ApiError) as refused:
        parse(request, body, LIMITS)
    assert refused.value.status == 400
    return refused.value


HOSTILE: dict[str, tuple[type[BaseModel], str, str, str]] = {
    "blocks": (MessagesRequest, '{"max_tokens":1,"messages":[{"role":"user","content":[', "{},", "{}]}]}"),
    "messages": (ChatRequest, '{"messages":[', "1,", "1]}"),
    "empty messages": (ChatRequest, '{"messages":[', "{},", "{}]}"),
    "parts": (ChatRequest, '{"messages":[{"role":"user","content":[', "{},", "{}]}]}"),
    "prompts": (CompletionRequest, '{"prompt":[', '"",', '""]}'),
    "lists of ids": (CompletionRequest, '{"prompt":[', "[1],", "[1]]}"),
    "tokens": (DetokenizeRequest, '{"tokens":[', "[],", "[]]}"),
    "items": (ResponsesRequest, '{"input":[', "{},", "{}]}"),
    "fields": (ChatRequest, "{", '"a":1,', '"b":1}'),
    "depth": (ChatRequest, '{"messages":', "[", "]"),
}


@pytest.mark.parametrize("size", [BYTES, 3 * MIN_VALUES // 2], ids=["largest", "within the limits"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_refusal_takes_bounded_memory(kind: str, size: int) -> None:
    """Three times the largest body. What is within the limits has few values, each of which becomes an object."""
    request, head, unit, tail = HOSTILE[kind]
    body = repeated(head, unit, tail, size)
    tracemalloc.start()
    try:
        refusal(request, body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * BYTES


def test_the_first_fault_of_a_list_is_the_only_one_built() -> None:
    body = repeated('{"messages":[', "1,", "1]}", 2 * MAX_LIST)
    assert refusal(ChatRequest, body).message.startswith("messages.0")


def test_long_lists_are_refused_by_name() -> None:
    body = repeated('{"messages":[', '{"role":"user","content":""},', "1]}", 28 * (MAX_LIST + 2))
    assert "messages" in refusal(ChatRequest, body).message


def test_unknown_fields_have_a_limit() -> None:
    fields = ",".join(f'"a{i}":1' for i in range(300))
    assert "256" in refusal(ChatRequest, f'{{"messages":[{{"role":"user","content":""}}],{fields}}}'.encode()).message


@pytest.mark.parametrize(
    ("body", "fine"),
    [
        (b'"' + b",[{" * 200_000 + b'"', True),  # inside a string
        (b'"' + rb"\",[{\\" * 200_000 + b'"', True),
        (rb'"\\"' + b",1" * (MIN_VALUES + 1), False),  # after a string that ends with a backslash
        (b"[" + b"1," * (MIN_VALUES - 2) + b"1]", True),
        (b"[" + b"1," * MIN_VALUES + b"1]", False),
        (b'"",' * (MAX_STRINGS + 1), False),
        (b"[" * 64 + b"]" * 64, True),
        (b"[" * 65 + b"]" * 65, False),
        (b"[{" * 32 + b"[", False),
        (b"]" * 100_000, True),  # the parser's business
    ],
)
def test_only_structure_counts(body: bytes, fine: bool) -> None:
    if fine:
        check_limits(body, LIMITS)
    else:
        with pytest.raises(ApiError):
            check_limits(body, LIMITS)


def test_a_prompt_of_ids_may_fill_the_context() -> None:
    context = 200_000
    body = b'{"prompt":[' + b"12345," * (context - 1) + b"1]}"
    request, unknown = parse(CompletionRequest, body, JsonLimits.for_context(64, context))
    assert isinstance(request.prompt, list)
    assert (len(request.prompt), unknown) == (context, [])
