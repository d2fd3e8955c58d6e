"""Which conversation a request belongs to, by its header and body alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slipstream.ray.affinity import session_key

FIRST = {"role": "user", "content": "Where is Oslo?"}
LATER = [FIRST, {"role": "assistant", "content": "In Norway."}, {"role": "user", "content": "And Bergen?"}]
SYSTEM = {"role": "system", "content": "Be short."}


def key(header: str | None = None, **body: Any) -> str | None:
    return session_key(header, json.dumps(body).encode())


def test_the_order() -> None:
    body = {"prompt_cache_key": "k", "metadata": {"user_id": "u"}, "messages": [FIRST]}
    assert key("s", **body) == key("s")
    assert key(**body) == key(prompt_cache_key="k") != key("k")
    del body["prompt_cache_key"]
    assert key(**body) == key(metadata={"user_id": "u"}) != key(prompt_cache_key="u")
    del body["metadata"]
    assert key(**body) == key(messages=[FIRST])


@pytest.mark.parametrize(
    ("first", "later"),
    [
        ({"messages": [FIRST]}, {"messages": LATER}),
        ({"messages": [SYSTEM, FIRST]}, {"messages": [SYSTEM, *LATER], "temperature": 0.5, "tools": []}),
        ({"system": "Be short.", "messages": [FIRST]}, {"system": "Be short.", "messages": LATER}),
        ({"instructions": "Be short.", "input": [FIRST]}, {"instructions": "Be short.", "input": LATER}),
        ({"prompt": "Once " * 2000}, {"prompt": "Once " * 3000}),
        ({"prompt": [5, 6, 7]}, {"prompt": [5, 6, 7], "stream": True}),
    ],
)
def test_turns_of_a_conversation_share_their_key(first: dict[str, Any], later: dict[str, Any]) -> None:
    assert key(**first) == key(**later) is not None


def test_marks_of_parts_do_not_count() -> None:
    """Anthropic's clients move `cache_control` to the last turns."""
    marked = {"type": "text", "text": "Where is Oslo?", "cache_control": {"type": "ephemeral"}}
    plain = {"type": "text", "text": "Where is Oslo?"}
    found = {key(messages=[{"role": "user", "content": content}]) for content in ([marked], [plain], "Where is Oslo?")}
    assert len(found) == 1


def test_other_beginnings_are_other_conversations() -> None:
    other = {"role": "user", "content": "Where is Rome?"}
    bodies = [
        {"messages": [FIRST]},
        {"messages": [other]},
        {"messages": [SYSTEM, FIRST]},
        {"prompt": "Once"},
        {"prompt": [1, 2]},
        {"prompt": [1, 3]},
    ]
    assert len({key(**body) for body in bodies}) == len(bodies)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"7", b"{}", b'{"messages": []}', b'{"prompt_cache_key": 3}', b"\xff\xfe", b"[" * 100_000],
)
def test_bodies_that_say_nothing(body: bytes) -> None:
    assert session_key(None, body) is None


@pytest.mark.parametrize(
    "messages",
    [[{"role": "user"}], [{"content": [{"type": "image"}]}], [{"content": [3, "x"]}], ["x"], [{"content": {"a": 1}}]],
)
def test_strange_messages_raise_nothing(messages: Any) -> None:
    key(messages=messages, system={"x": 1}, metadata=[], prompt_cache_key="")
